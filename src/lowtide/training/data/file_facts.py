"""Whether the pictures of a training are still those that it began with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

# Bytes, and the time of the last change in nanoseconds.
FileFacts = tuple[int, int]

_NAMED = 3


def collect_file_facts(paths: Iterable[Path]) -> dict[str, FileFacts]:
    """Size and time of change of each file, by its path. Nothing is read of them."""
    facts: dict[str, FileFacts] = {}
    for path in paths:
        known = path.stat()
        facts[str(path)] = known.st_size, known.st_mtime_ns
    return facts


def changed_files(before: Mapping[str, FileFacts], now: Mapping[str, FileFacts]) -> str:
    """What makes ``now`` other data than ``before``: files that are new, gone, or of another size;
    empty where there are none."""
    both = before.keys() & now.keys()
    kinds = {
        "new": now.keys() - before.keys(),
        "gone": before.keys() - now.keys(),
        "changed": {path for path in both if before[path][0] != now[path][0]},
    }
    return ", ".join(_told(paths, kind) for kind, paths in kinds.items() if paths)


def rewritten_files(before: Mapping[str, FileFacts], now: Mapping[str, FileFacts]) -> str:
    """Files of the same size that were written since, as copies are too; empty where none were."""
    both = before.keys() & now.keys()
    paths = {
        path for path in both if before[path][0] == now[path][0] and before[path][1] != now[path][1]
    }
    return _told(paths, "written again") if paths else ""


def _told(paths: Iterable[str], kind: str) -> str:
    known = sorted(paths)
    more = ", ..." if len(known) > _NAMED else ""
    return f"{len(known):,} {kind} ({', '.join(known[:_NAMED])}{more})"
