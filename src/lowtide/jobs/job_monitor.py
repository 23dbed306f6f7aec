"""Progress and memory metering while a job's model is loaded and probed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, Progress, ProgressCallback
from lowtide.core.units import MIB
from lowtide.jobs.prepare import PreparedModel, prepare, runtime_identity
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.cache import MeasurementCache, cache_folder, package_digest
from lowtide.memory.costs import ModelCosts
from lowtide.memory.meter import CudaMeter, HostMeter
from lowtide.memory.plan_file import PlanFile
from lowtide.streaming.planner.program_cache import preload_capture

# Resident memory differs by up to this much from run to run.
_NOISE_BYTES = 8 * MIB


def report_progress(progress: ProgressCallback | None, phase: Any, name: str) -> None:
    """Report the start of a phase to ``progress``, if it is not None."""
    if progress is not None:
        progress(Progress(phase, name))


@dataclass(frozen=True)
class JobMonitor:
    """A running memory meter, and the job's progress and cancel callbacks."""

    meter: HostMeter | CudaMeter
    progress: ProgressCallback | None
    cancel: Cancel

    def prepare(
        self,
        settings: UpscaleSettings,
        device: str,
        budget: Budget,
        plan_file: PlanFile | None,
        costs: ModelCosts | None = None,
        *,
        runs_job: bool = True,
        on_loaded: Callable[[int], object] = lambda scale: None,
    ) -> PreparedModel:
        """Load and probe the model, reporting progress for each slow phase, now or later.

                Measures the host memory that becomes resident on the CPU and is not weights.

                Args:
                    plan_file: Plan to replay, or None.
                    costs: Known costs, as in `lowtide.jobs.prepare.prepare`.
        runs_job: Whether this process also runs the job, and so keeps what a probe leaves.
        """
        model = settings.model_name
        before_probe: int | None = None

        def on_probe() -> None:
            nonlocal before_probe
            before_probe = self._resident_bytes()
            self._start_phase("probe", model, _load_tracing)

        report_progress(self.progress, "load", model)
        before = self._resident_bytes()
        prepared = prepare(
            settings,
            device=device,
            costs=costs,
            limit_bytes=budget.device_bytes // 2,
            on_probe=on_probe,
            cancel=self.cancel,
            replayed=plan_file.plans[0][1] if plan_file else None,
            on_loaded=on_loaded,
        )
        if device == "cpu":
            # Only this process holds what a probe leaves.
            keeps_probe_memory = runs_job and before_probe is not None
            held = (
                before_probe
                if before_probe and not runs_job
                else self._resident_bytes(collect=keeps_probe_memory)
            )
            extra_bytes = max(0, held - before - prepared.costs.weight_bytes)
            prepared.extra_resident_bytes = (
                extra_bytes
                if keeps_probe_memory
                else _stable_bytes(prepared, settings, extra_bytes)
            )
        prepared.programs.on_capture = lambda: self._start_phase("capture", model, preload_capture)
        return prepared

    def _resident_bytes(self, *, collect: bool = False) -> int:
        trim_heap(collect=collect)
        return self.meter.current_bytes

    def _start_phase(self, phase: str, model: str, load: Callable[[], object]) -> None:
        """Report a phase and load its libraries, excluded from the measured memory.

        Most runs do not need these libraries, and they are not memory of the run itself.
        """
        report_progress(self.progress, phase, model)
        with self.meter.excluding():
            load()


def _stable_bytes(prepared: PreparedModel, settings: UpscaleSettings, measured: int) -> int:
    """Return ``measured``, or the stored figure if it differs by little.

    A budget that an error message named has to be enough in the next run.
    """
    store = MeasurementCache(f"beside-{package_digest()}", cache_folder())
    key = f"{runtime_identity(prepared.descriptor, settings.provider)} {prepared.precision}"
    known = store.get(key)
    if known is None or measured > known + _NOISE_BYTES:
        known = measured
        store.put(key, known)
        store.save()
    return known


def _load_tracing() -> None:
    from lowtide.streaming.probe.trace_memory import preload_tracing

    preload_tracing()
