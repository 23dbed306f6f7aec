"""Files among the inputs that are skipped, with reasons for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.media.camera_raw import is_raw_name
from lowtide.media.detect import HEAD_BYTES, describe, identify
from lowtide.media.formats import format_of_suffix

_NAMED = 3  # files listed per reason


@dataclass(frozen=True)
class SkippedFile:
    """Skipped file or folder among the inputs, and the reason."""

    path: Path
    reason: str


def skip_reason(path: Path) -> str:
    """Describe why a path that is not of a job's kind is skipped, by its name and content."""
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "not a regular file" if path.exists() else "a broken link"
    if is_raw_name(path):
        return "camera RAW, needs developing first"
    if format_of_suffix(path.suffix or ".") is not None:
        return "an image"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not head:
        return "empty"
    kind = identify(head)
    return describe(head) if kind is None else f"{kind.name} by its content, but not by its name"


def skipped_summary(skipped: Sequence[SkippedFile]) -> list[str]:
    """Return a line per reason with a few names: ``hidden: .git, .cache and 3 more``."""
    names: dict[str, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reason, []).append(str(one.path))
    return [
        f"{reason}: {', '.join(paths[:_NAMED])}"
        + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
        for reason, paths in sorted(names.items(), key=lambda item: -len(item[1]))
    ]
