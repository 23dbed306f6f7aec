"""Detection of changed training images when a run resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

# Size in bytes, and modification time in nanoseconds.
FileFacts = tuple[int, int]

_MAX_NAMED = 3


def collect_file_facts(paths: Iterable[Path]) -> dict[str, FileFacts]:
    """Return size and modification time of each file by path, reading no contents."""
    facts: dict[str, FileFacts] = {}
    for path in paths:
        known = path.stat()
        facts[str(path)] = known.st_size, known.st_mtime_ns
    return facts


def changed_files(before: Mapping[str, FileFacts], now: Mapping[str, FileFacts]) -> str:
    """Describe files that are new, gone, or of another size; empty if there are none."""
    both = before.keys() & now.keys()
    kinds = {
        "new": now.keys() - before.keys(),
        "removed": before.keys() - now.keys(),
        "changed": {path for path in both if before[path][0] != now[path][0]},
    }
    return ", ".join(_describe_files(paths, kind) for kind, paths in kinds.items() if paths)


def rewritten_files(before: Mapping[str, FileFacts], now: Mapping[str, FileFacts]) -> str:
    """Describe files of the same size with another modification time; empty if none.

    Copies of the same files have another time too.
    """
    both = before.keys() & now.keys()
    paths = {
        path for path in both if before[path][0] == now[path][0] and before[path][1] != now[path][1]
    }
    return _describe_files(paths, "rewritten") if paths else ""


def _describe_files(paths: Iterable[str], kind: str) -> str:
    names = sorted(paths)
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{len(names):,} {kind} ({', '.join(names[:_MAX_NAMED])}{more})"
