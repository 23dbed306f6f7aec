"""Progress reports and cancellation, as plain callables for any program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lowtide.core.errors import Cancelled

Phase = Literal["load", "slow", "probe", "capture", "compile", "record", "run", "check", "done"]


@dataclass(frozen=True)
class Progress:
    """Progress of a job at one moment, passed to a `ProgressCallback`.

    ``done`` and ``total`` count output rows of the current image in phase ``run``, and what is read
    again of a finished output in phase ``check``; in phase ``slow``, before anything is measured,
    ``name`` is a sentence that says by how much a precision slows the run down; ``image`` and
    ``images`` number the inputs of a batch from 1. Bytes are what the run has added to the process
    so far (CPU) or what the process holds on the device (CUDA). ``unit`` is what is counted where
    that is not rows: ``"frames"``.
    """

    phase: Phase
    name: str = ""
    done: int = 0
    total: int = 0
    image: int = 1
    images: int = 1
    elapsed: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0
    unit: str = ""

    @property
    def eta(self) -> float | None:
        """Seconds left for this image, at its average speed; None before the first step."""
        if not self.done or not self.total:
            return None
        return self.elapsed * (self.total - self.done) / self.done


ProgressCallback = Callable[[Progress], None]
Cancel = threading.Event | Callable[[], bool] | None


def report_phase(progress: ProgressCallback | None, phase: Phase, name: str = "") -> None:
    """Report the start of a phase to ``progress``, if it is not None."""
    if progress is not None:
        progress(Progress(phase, name))


def raise_if_cancelled(cancel: Cancel) -> None:
    """Raise `Cancelled` if the caller's event is set or its callable returns true."""
    if cancel is None:
        return
    stop = cancel.is_set() if isinstance(cancel, threading.Event) else cancel()
    if stop:
        raise Cancelled("cancelled; finished files are kept, partial ones are removed")
