"""Training checkpoints from which a run resumes exactly, and images that changed meanwhile."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.core.atomic_file import atomic_output, part_path, sync_to_disk, write_error
from lowtide.core.errors import InputError, OutputError
from lowtide.memory.oom import is_out_of_memory

_KEEP_LAST = 2
_SUFFIX = ".state"

# Size in bytes, and modification time in nanoseconds.
FileFacts = tuple[int, int]
_MAX_NAMED = 3


@dataclass
class TrainState:
    """Checkpoint of a training after ``step`` steps.

    ``parts`` are state dicts by name. ``sums`` are the losses since the last log row, summed over
    ``counted`` steps. ``best`` is the best score so far, after ``best_step`` steps, ``scored_by``
    how it was measured, and ``since_best`` how many validations were no better since. ``files`` are
    the training images.

    No RNG state is needed: every sample is drawn from the seed, the step and its place in the
    batch.
    """

    step: int
    parts: dict[str, Any]
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    scored_by: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)


def save_state(folder: Path, state: TrainState) -> Path:
    """Write ``<step>.state`` into ``folder`` and return its path.

    The last two states are kept, and none of a later step. The write is atomic: a run killed
    meanwhile leaves the earlier states and a partial file, which the next call removes. Raises
    `OutputError` if the write fails; the earlier states stay.
    """
    path = folder / f"{state.step}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(part_path(Path(f"*{_SUFFIX}")).name):
            unfinished.unlink()
        with atomic_output(path) as part:
            torch.save(vars(state), part)
        sync_to_disk(folder)  # or after a power cut a removed state may be back and this one lost
        found = _list_states(folder)
        position = found.index(path) + 1
        # States of later steps are damaged, or this run would have resumed from them.
        for other in (*found[: max(position - _KEEP_LAST, 0)], *found[position:]):
            other.unlink()
    except OSError as error:
        raise write_error(path, error) from error
    except RuntimeError as error:  # torch.save raises it for a failed write
        raise OutputError(f"{path}: the training state could not be saved: {error}") from error
    return path


def load_latest_state(folder: Path) -> tuple[TrainState | None, dict[Path, str]]:
    """Return the newest intact state in ``folder`` and the damaged newer ones.

    Damaged files are mapped to the reason. The state is None if the folder has none. Raises
    `InputError` if all are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(_list_states(folder)):
        try:
            return _load_verified(path), damaged
        except PermissionError as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        except Exception as error:
            # A damaged file may raise anything; after out of memory the file may be intact.
            if is_out_of_memory(error):
                raise
            damaged[path] = f"{type(error).__name__}: {error}".splitlines()[0]
    if damaged:
        path, reason = next(iter(damaged.items()))
        others = f"; neither can the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise InputError(
            f"{path} cannot be read: {reason}{others}", hint=f"remove {folder} to start over"
        )
    return None, damaged


def _load_verified(path: Path) -> TrainState:
    """Load a state after checking its CRCs, which `torch.load` does not check."""
    with zipfile.ZipFile(path) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"{changed} is corrupt")
    return TrainState(**torch.load(path, map_location="cpu", weights_only=True))


def _list_states(folder: Path) -> list[Path]:
    """Return the state files in ``folder``, oldest first."""
    states = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit() and path.is_file()]
    return sorted(states, key=lambda path: int(path.stem))


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
