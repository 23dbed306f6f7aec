"""Pinned state of a folder's first run, by which a resumed run makes equal files.

Measured costs and free memory differ a little each time; with the pinned ones a resumed file is
planned, and so made, as in an undisturbed run. A pin is valid as long as the versions of all that
computes are the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from pydantic import BaseModel, ValidationError

from lowtide.jobs.journal import Journal
from lowtide.jobs.prepare import PreparedModel
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.prediction.calibration import Calibration, RunBounds, RunKind
from lowtide.streaming.specialize.shape_specialized import SpecializationGain


class _Pin(BaseModel):
    """The pinned state; fields with a default may be absent from older journals."""

    device: str
    device_bytes: int
    host_bytes: int
    versions: dict[str, str]
    costs: ModelCosts
    bounds: dict[RunKind, Calibration | None] = {}
    beside_bytes: int | None = None
    compiling: SpecializationGain | None = None


class ResumeState:
    """Read and write the pin of a folder's journal; does nothing without a journal."""

    def __init__(self, journal: Journal | None, versions: dict[str, str]) -> None:
        self._journal, self._versions = journal, versions
        pin = journal.pin if journal is not None else {}
        self._kept: _Pin | None = None
        if pin.get("versions") == versions:
            # A damaged pin counts as one of other versions: all is measured again.
            with contextlib.suppress(ValidationError):
                self._kept = _Pin.model_validate(pin)

    @property
    def costs(self) -> ModelCosts | None:
        """The model costs that the folder was begun with, or None."""
        return None if self._kept is None else self._kept.costs

    def budget(self, asked: str | int | Budget, budget: Budget) -> Budget:
        """Return ``budget``, pinned to the first run's if ``asked`` follows free memory."""
        kept = self._kept
        follows = isinstance(asked, str) and (asked == "auto" or asked.endswith("%"))
        if kept is None or not follows or kept.device != budget.device:
            return budget
        return replace(budget, device_bytes=kept.device_bytes, host_bytes=kept.host_bytes)

    def apply(self, prepared: PreparedModel) -> None:
        """Restore the pinned run bounds and compile gain: they decide how images are run."""
        kept = self._kept
        if kept is None:
            return
        prepared.compiling = kept.compiling
        prepared.tiled = self._bounds("tiled", prepared.tiled)
        prepared.streamed = self._bounds("streamed", prepared.streamed)
        if kept.beside_bytes is not None:
            prepared.beside_bytes = kept.beside_bytes

    def _bounds(self, kind: RunKind, now: RunBounds) -> RunBounds:
        """Return ``now`` with the pinned usual bound, if the journal has one."""
        kept = {} if self._kept is None else self._kept.bounds
        return now.model_copy(update={"usual": kept[kind]}) if kind in kept else now

    def write(self, budget: Budget, prepared: PreparedModel) -> None:
        """Pin this run's state for a run that resumes the folder."""
        if self._journal is None:
            return
        pin = _Pin(
            device=budget.device,
            device_bytes=budget.device_bytes,
            host_bytes=budget.host_bytes,
            versions=self._versions,
            costs=prepared.costs,
            beside_bytes=prepared.beside_bytes,
            bounds={"tiled": prepared.tiled.usual, "streamed": prepared.streamed.usual},
            compiling=prepared.compiling,
        )
        self._journal.set_pin(pin.model_dump())
