"""Everything that a run needs to go on as if it had not been stopped."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.core.atomic_file import part_path, sync, write_error, writing
from lowtide.core.errors import InputError, OutputError
from lowtide.memory.oom import is_out_of_memory
from lowtide.training.data.file_facts import FileFacts

_KEPT = 2
_SUFFIX = ".state"


@dataclass
class TrainState:
    """``step`` steps are done. ``parts`` are state dicts by name; ``sums`` the losses since the
    last line of the log, over ``counted`` steps; ``best`` the best score so far, by ``scored_by``;
    ``files`` are the pictures that it is trained on.

    Random numbers need no place here: every sample is drawn by seed, step and place.
    """

    step: int
    parts: dict[str, Any]
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    best: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    scored_by: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)


def save_state(folder: Path, state: TrainState) -> Path:
    """Write ``<step>.state`` into ``folder`` and keep the last two, none of a later step.

    A run that is killed meanwhile leaves what was there before, and a part of a state, which the
    next call removes. Raises `OutputError`, and then all that was there still is.
    """
    path = folder / f"{state.step}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(part_path(Path(f"*{_SUFFIX}")).name):
            unfinished.unlink()
        with writing(path) as part:
            torch.save(vars(state), part)
        sync(folder)  # or a power cut might bring back one that is removed, and not this one
        found = _found(folder)
        here = found.index(path) + 1
        # Later ones could not be read, or this run would have begun with them.
        for other in (*found[: max(here - _KEPT, 0)], *found[here:]):
            other.unlink()
    except OSError as error:
        raise write_error(path, error) from error
    except RuntimeError as error:  # as PyTorch tells of a file that it cannot write
        raise OutputError(f"{path}: the state of the training cannot be kept: {error}") from error
    return path


def last_state(folder: Path) -> tuple[TrainState | None, dict[Path, str]]:
    """The newest state in ``folder`` that is whole, and what is wrong with each that is newer.

    None where there is no state at all. Raises `InputError` where all are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(_found(folder)):
        try:
            return _read(path), damaged
        except PermissionError as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        except Exception as error:
            # A damaged file may raise anything; but what memory forbids may be whole.
            if is_out_of_memory(error):
                raise
            damaged[path] = f"{type(error).__name__}: {error}".splitlines()[0]
    if damaged:
        path, reason = next(iter(damaged.items()))
        others = f", nor any of the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise InputError(
            f"{path} cannot be read: {reason}{others}", hint=f"remove {folder} to begin anew"
        )
    return None, damaged


def _read(path: Path) -> TrainState:
    """A state whose bytes are those that were written: PyTorch itself compares no checksums."""
    with zipfile.ZipFile(path) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"{changed} is not what was written")
    return TrainState(**torch.load(path, map_location="cpu", weights_only=True))


def _found(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    states = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit() and path.is_file()]
    return sorted(states, key=lambda path: int(path.stem))
