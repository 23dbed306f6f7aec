"""Finished segments of an output that is being made, by which a stopped job resumes.

They are in a hidden folder next to the output, with a journal that records each, and the plan by
which the first run made its frames. The folder is removed when the output has its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from lowtide.core.atomic_file import sync_to_disk
from lowtide.core.errors import OutputError
from lowtide.core.input_file import exists
from lowtide.jobs.engine.journal import JOURNAL_NAME, JobJournal
from lowtide.memory.plan import Plan

STARTED_OVER = (
    "what a stopped run left was made with another input, model, plan or settings: started over"
)
# Segments of image files: hashes of these.
SEQUENCE_SUFFIX = ".json"


@dataclass(frozen=True)
class VideoSegment:
    """Frames ``first`` to before ``last`` of a clip, written together into ``path``.

    Of image files that is a list of them. ``how`` is what determines its bytes besides what is the
    same for all segments.
    """

    first: int
    last: int
    path: Path
    how: str = ""


def segments_folder(target: Path) -> Path:
    """Return the folder of the segments of ``target``."""
    return target.with_name(f".{target.name}.lowtide")


def segments_of(target: Path, first: int, last: int, step: int, suffix: str) -> list[VideoSegment]:
    """Return the segments of frames ``first`` to before ``last``, of ``step`` frames each.

    Where they begin depends on nothing else, so that a resumed run makes the same ones.
    """
    folder = segments_folder(target)
    return [
        VideoSegment(start, min(start + step, last), folder / f"{start:09}{suffix}")
        for start in range(first, last, step)
    ]


class SegmentsFolder:
    """Folder of the segments of one output, locked against a second run while it is open.

    Args:
        target: The output.
        key: Hash of all that determines a segment's bytes, except which frames it holds.

    Raises:
        OutputError: Another run writes this output, or the folder cannot be made.
    """

    def __init__(self, target: Path, key: str) -> None:
        self.folder, self._key = segments_folder(target), key
        self._new_folders = [one for one in self.folder.parents if not exists(one)]
        try:
            self._journal = JobJournal(self.folder)
        except OutputError as error:
            if "another job" not in error.message:
                raise
            raise OutputError(
                f"another job is writing {target}", hint="wait for it, or name another output"
            ) from error
        self._journal.remove_parts()

    def pin(self, plan: Plan) -> None:
        """Record the plan by which frames are made."""
        pin = {"key": self._key, "plan": plan.model_dump(mode="json")}
        if self._journal.pin != pin:
            self._journal.set_pin(pin)

    @property
    def has_finished(self) -> bool:
        """Whether any segment was finished, of any key."""
        return self._journal.has_results

    def is_finished(self, segment: VideoSegment) -> bool:
        """Return whether a segment is complete, of this key."""
        return self._journal.is_finished(segment.path, self._key_of(segment))

    def new_part(self, segment: VideoSegment) -> Path:
        """Return a temporary name for a segment."""
        return self._journal.new_part(segment.path)

    def new_text(self, segment: VideoSegment, text: str) -> Path:
        """Write a text under a temporary name for a segment, and return that."""
        part = self.new_part(segment)
        part.write_text(text, "utf-8")
        sync_to_disk(part)
        return part

    def finish(self, segment: VideoSegment, part: Path) -> None:
        """Give a complete file its name, and record it."""
        self._journal.begin(segment.path, self._key_of(segment))
        part.replace(segment.path)
        self._journal.done(segment.path, self._key_of(segment))

    def close(self, *, keep: bool) -> None:
        """Unlock the folder; remove it unless ``keep``, and empty ones that were made for it."""
        if not keep:
            for path in self.folder.iterdir():
                if path.name != JOURNAL_NAME:
                    path.unlink()
        self._journal.close()
        if not keep:
            with contextlib.suppress(OSError):  # another run may have begun
                (self.folder / JOURNAL_NAME).unlink(missing_ok=True)
                self.folder.rmdir()
                for folder in self._new_folders:
                    folder.rmdir()  # fails, and ends the loop, if not empty

    def _key_of(self, segment: VideoSegment) -> str:
        text = f"{self._key} {segment.first}:{segment.last}{segment.how}"
        return hashlib.sha256(text.encode()).hexdigest()


def pinned_plan(target: Path, key: str) -> Plan | None:
    """Return the plan of the run that left segments of ``target``, if they are of this ``key``."""
    try:
        lines = (segments_folder(target) / JOURNAL_NAME).read_text("utf-8").splitlines()
    except OSError:
        return None
    found: Any = None
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that a killed process cut off
            record = json.loads(line)
            if isinstance(record, dict) and "pin" in record:
                found = cast(dict[str, Any], record)["pin"]
    if not isinstance(found, dict) or found.get("key") != key:
        return None
    try:
        return Plan.model_validate(found["plan"])
    except ValidationError:  # of another version
        return None
