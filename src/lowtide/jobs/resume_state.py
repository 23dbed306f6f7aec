"""Pinned state of a folder's first run, by which a resumed run makes equal files.

Measured costs and free memory differ a little each time; with the pinned ones a resumed file is
planned, and so made, as in an undisturbed run. A pin is valid as long as the versions of all that
computes are the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, ValidationError

from lowtide.jobs.journal import Journal
from lowtide.jobs.prepare import PreparedModel
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.prediction.calibration import Calibration, RunBounds, RunKind
from lowtide.streaming.specialize.shape_specialized import SpecializationGain


class _Pin(BaseModel):
    """The pinned state; fields with a default may be absent from older journals."""

    model_config = ConfigDict(extra="forbid")  # a pin with other names counts as damaged

    device: str
    device_bytes: int
    host_bytes: int
    versions: dict[str, str]
    costs: ModelCosts
    bounds: dict[RunKind, Calibration | None] = {}
    extra_resident_bytes: int | None = None
    compile_gain: SpecializationGain | None = None


class ResumeState:
    """Read and write the pin of a folder's journal; does nothing without a journal."""

    def __init__(self, journal: Journal | None, versions: dict[str, str]) -> None:
        self._journal, self._versions = journal, versions
        pin = journal.pin if journal is not None else {}
        self._pin: _Pin | None = None
        if pin.get("versions") == versions:
            # A damaged pin counts as one of other versions: all is measured again.
            with contextlib.suppress(ValidationError):
                self._pin = _Pin.model_validate(pin)

    @property
    def costs(self) -> ModelCosts | None:
        """The model costs that the folder was begun with, or None."""
        return None if self._pin is None else self._pin.costs

    def budget(self, requested: str | int | Budget, budget: Budget) -> Budget:
        """Return ``budget``, pinned to the first run's if ``requested`` follows free memory."""
        pin = self._pin
        follows = isinstance(requested, str) and (requested == "auto" or requested.endswith("%"))
        if pin is None or not follows or pin.device != budget.device:
            return budget
        return replace(budget, device_bytes=pin.device_bytes, host_bytes=pin.host_bytes)

    def apply(self, prepared: PreparedModel) -> None:
        """Restore the pinned run bounds and compile gain: they decide how images are run."""
        pin = self._pin
        if pin is None:
            return
        prepared.compile_gain = pin.compile_gain
        prepared.tiled_bounds = self._bounds("tiled", prepared.tiled_bounds)
        prepared.streamed_bounds = self._bounds("streamed", prepared.streamed_bounds)
        if pin.extra_resident_bytes is not None:
            prepared.extra_resident_bytes = pin.extra_resident_bytes

    def _bounds(self, kind: RunKind, current: RunBounds) -> RunBounds:
        """Return ``current`` with the pinned usual bound, if the journal has one."""
        pinned = {} if self._pin is None else self._pin.bounds
        return (
            current.model_copy(update={"current_heap": pinned[kind]}) if kind in pinned else current
        )

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
            extra_resident_bytes=prepared.extra_resident_bytes,
            bounds={
                "tiled": prepared.tiled_bounds.current_heap,
                "streamed": prepared.streamed_bounds.current_heap,
            },
            compile_gain=prepared.compile_gain,
        )
        self._journal.set_pin(pin.model_dump())
