"""What looks on while a job is made ready: progress, and the memory its model comes to hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, Progress, ProgressCallback
from lowtide.core.units import MIB
from lowtide.jobs.prepare import Prepared, prepare
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.meter import CudaMeter, HostMeter
from lowtide.memory.replay import PlanBook
from lowtide.streaming.bands.programs import load_capture


def tell(progress: ProgressCallback | None, phase: Any, name: str) -> None:
    """One word of progress, if anybody listens."""
    if progress is not None:
        progress(Progress(phase, name))


@dataclass(frozen=True)
class Watch:
    """A meter that runs, and who is told."""

    meter: HostMeter | CudaMeter
    progress: ProgressCallback | None
    cancel: Cancel

    def prepare(
        self, settings: UpscaleSettings, device: str, budget: Budget, book: PlanBook | None,
        costs: ModelCosts | None = None,
    ) -> Prepared:  # fmt: skip
        """The model, and a word about whatever takes seconds, now or at the first image."""
        model = settings.model_name
        tell(self.progress, "load", model)
        before = self._held()
        prepared = prepare(
            settings, device=device, costs=costs, limit_bytes=budget.device_bytes // 2,
            on_probe=lambda: self._begin("probe", model, _load_tracing), cancel=self.cancel,
            replayed=book.plans[0][1] if book else None,
        )  # fmt: skip
        if device == "cpu":
            beside = self._held() - before - prepared.costs.weight_bytes
            # In whole MiB, since a plan should not hang on pages.
            prepared.beside_bytes = max(0, -(-beside // MIB) * MIB)
        prepared.programs.on_capture = lambda: self._begin("capture", model, load_capture)
        return prepared

    def _held(self) -> int:
        trim_heap(collect=True)
        return self.meter.now_bytes

    def _begin(self, phase: str, model: str, load: Callable[[], object]) -> None:
        """Libraries that most runs do without load late, and are not the run's own memory."""
        tell(self.progress, phase, model)
        with self.meter.apart():
            load()


def _load_tracing() -> None:
    from lowtide.streaming.tracing import load_tracing

    load_tracing()
