"""Everything that a run needs to go on as if it had not been stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.core.errors import InputError, OutputError
from lowtide.core.part_file import part_of, replacing

_KEPT = 2
_SUFFIX = ".state"


@dataclass
class State:
    """``step`` steps are done. ``parts`` are state dicts by name; ``sums`` the losses since the
    last line of the log, over ``counted`` steps; ``best`` the best score so far.

    Random numbers need no place here: every sample is drawn by seed, step and place.
    """

    step: int
    parts: dict[str, Any]
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    best: float | None = None
    config: dict[str, Any] = field(default_factory=dict)


def save_state(folder: Path, state: State) -> Path:
    """Write ``<step>.state`` into ``folder`` and keep the last two.

    A run that is killed meanwhile leaves what was there before, and a part of a state, which the
    next call removes. Raises `OutputError`.
    """
    path = folder / f"{state.step}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(part_of(Path(f"*{_SUFFIX}")).name):
            unfinished.unlink()
        with replacing(path) as part, part.open("wb") as file:
            torch.save(vars(state), file)
            file.flush()
            os.fsync(file.fileno())
        for old in _found(folder)[:-_KEPT]:
            old.unlink()
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{path}: the state of the training cannot be kept: {error}") from error
    return path


def last_state(folder: Path) -> State | None:
    """The newest state in ``folder``, or None. Raises `InputError` for a damaged one."""
    found = _found(folder)
    if not found:
        return None
    try:
        return State(**torch.load(found[-1], map_location="cpu", weights_only=True))
    except Exception as error:
        raise InputError(
            f"{found[-1]} cannot be read: {error}",
            hint=f"remove it, and the one before is taken, or all of {folder} to begin anew",
        ) from error


def _found(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    states = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit()]
    return sorted(states, key=lambda path: int(path.stem))
