"""What a folder's journal keeps of the run that began it, so that the rest is made as by that run.

Costs are measured and so differ a little each time, and so does what is free; with the pinned ones
a resumed file is planned, and so made, as in an undisturbed run. A pin counts as long as the
versions of all that computes are the same.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.jobs.journal import Journal
from lowtide.jobs.prepare import Prepared
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.estimating.calibration import Calibration, RunBounds, RunKind
from lowtide.streaming.one_shape import SpeedFacts


class Pins:
    """Pins of a folder's journal; of a single file, which has none, nothing is kept."""

    def __init__(self, journal: Journal | None, versions: dict[str, str]) -> None:
        self._journal, self._versions = journal, versions
        pin = journal.pin if journal is not None else {}
        self._kept = pin if pin.get("versions") == versions else {}

    @property
    def costs(self) -> ModelCosts | None:
        """Those that the folder was begun with."""
        return ModelCosts.model_validate(self._kept["costs"]) if self._kept else None

    def budget(self, asked: str | int | Budget, budget: Budget) -> Budget:
        """``budget``; where what was asked for follows what is free, as the first run found it."""
        follows = isinstance(asked, str) and (asked == "auto" or asked.endswith("%"))
        if not (self._kept and follows and self._kept["device"] == budget.device):
            return budget
        return replace(
            budget, device_bytes=self._kept["device_bytes"], host_bytes=self._kept["host_bytes"]
        )

    def apply(self, prepared: Prepared) -> None:
        """Give back what was known of runs and of compiling: it decides how images are run."""
        if not self._kept:
            return
        compiling = self._kept.get("compiling")
        prepared.compiling = None if compiling is None else SpeedFacts.model_validate(compiling)
        prepared.tiled = self._bounds("tiled", prepared.tiled)
        prepared.streamed = self._bounds("streamed", prepared.streamed)
        prepared.beside_bytes = self._kept.get("beside_bytes", prepared.beside_bytes)

    def _bounds(self, kind: RunKind, now: RunBounds) -> RunBounds:
        """``now`` with the usual bound that the folder began with; its journal may be older."""
        kept = self._kept.get("bounds", {})
        if kind not in kept:
            return now
        usual = None if kept[kind] is None else Calibration.model_validate(kept[kind])
        return now.model_copy(update={"usual": usual})

    def write(self, budget: Budget, prepared: Prepared) -> None:
        """Keep what this run is made with for one that goes on with the folder."""
        if self._journal is None:
            return
        bounds = {
            kind: known.usual and known.usual.model_dump()
            for kind, known in (("tiled", prepared.tiled), ("streamed", prepared.streamed))
        }  # fmt: skip
        self._journal.set_pin({
            "device": budget.device, "device_bytes": budget.device_bytes,
            "host_bytes": budget.host_bytes, "versions": self._versions,
            "costs": prepared.costs.model_dump(), "bounds": bounds,
            "beside_bytes": prepared.beside_bytes,
            "compiling": prepared.compiling and prepared.compiling.model_dump(),
        })  # fmt: skip
