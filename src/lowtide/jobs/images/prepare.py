"""Load a model onto its device and get its costs from the cache or a probe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap, trimming_heap
from lowtide.core.progress import Cancel, Phase, ProgressCallback, report_phase
from lowtide.core.units import MIB
from lowtide.jobs.engine.devices import resolve_precision
from lowtide.jobs.engine.report import versions_used
from lowtide.jobs.images.adapter import require_image_channels
from lowtide.jobs.images.build_network import (
    build_network,
    ensemble_network,
    network_weight_bytes,
    to_memory_format,
)
from lowtide.jobs.images.model_costs import ModelCostFinder
from lowtide.jobs.images.plan_in_child import ChildPlanner
from lowtide.jobs.images.prepared import PlanMeasurements, PreparedModel, geometry_of
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.whole_image import WholeImage
from lowtide.memory.costs import ModelCosts
from lowtide.memory.cpu_half_precision import slowdown_note
from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter
from lowtide.memory.oom import naming_out_of_memory
from lowtide.memory.plan import Plan
from lowtide.memory.plan_store import JsonCache, machine_facts
from lowtide.memory.prediction.calibration import RunBounds, RunKind, run_bounds
from lowtide.memory.process_memory import failing_beyond_container
from lowtide.models import Model, ModelDescriptor, bundled_names, load
from lowtide.models.denoiser.denoiser import prepend_denoiser, set_nominal_level
from lowtide.models.loaded_model import as_ensemble
from lowtide.models.model_files import is_onnx
from lowtide.models.onnx_runtime import load_runtime
from lowtide.models.spandrel_files import family_names
from lowtide.streaming.planner.model_facts import ModelGeometry
from lowtide.streaming.planner.program_cache import StreamPlannerCache, import_capture_libraries
from lowtide.streaming.planner.tile_candidates import require_valid_overrides
from lowtide.streaming.specialize import require_cuda_graphs
from lowtide.streaming.tiles.network import RunnableNetwork

_RUN_KINDS: tuple[RunKind, ...] = ("tiled", "streamed")
# Resident memory differs by up to this much from run to run.
_NOISE_BYTES = 8 * MIB


def import_job_libraries(settings: ImageSettings) -> None:
    """Import the libraries that the job needs, before a meter takes its baseline."""
    versions_used(settings.model_name)
    if is_onnx(settings.model_name):
        load_runtime()
    elif settings.model_name not in bundled_names():
        family_names()


def load_prepared_model(
    settings: ImageSettings,
    *,
    device: str,
    limit_bytes: int | None = None,
    known: PlanMeasurements | None = None,
    replayed: Plan | None = None,
    meter: HostMemoryMeter | CudaMemoryMeter | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    runs_job: bool = True,
    on_loaded: Callable[[int], object] = lambda scale: None,
    child: ChildPlanner | None = None,
    whole: WholeImage | None = None,
) -> PreparedModel:
    """Load the model and get its costs from ``known``, the package, the cache or a probe.

    Args:
        limit_bytes: Limit of the probe's memory, rounded down to a power of two, so that similar
            limits share a cache entry.
        known: Measurements to take over, if they are of this model, device and precision.
        replayed: Plan to run again, which sets precision and memory format.
        meter: Running meter, which on the CPU measures what becomes resident and is not weights.
        progress: Gets each slow phase, now or when a network is captured.
        runs_job: Whether this process also runs the job, and so keeps what a probe leaves.
        on_loaded: Called with the model's scale before anything is measured; its exceptions
            propagate.
        child: Measures and plans instead of this process.
        whole: The only image of the job. Where half of the budget is enough for it at once, by a
            trace of that run, or where it is to run in bands, nothing is measured about tiles.

    Raises:
        ModelError: The model cannot be loaded or run.
        UsageError: The settings do not suit the model or the device.
        OutOfMemoryError: Memory ran out while the model was loaded or probed.
    """
    monitor = _Monitor(settings.model_name, meter, progress, child)
    with naming_out_of_memory(
        f"while {settings.model_name} was loaded and measured",
        "close other programs, or pass a smaller --budget so that less is tried",
    ):
        if settings.cuda_graphs:
            require_cuda_graphs(device)
        monitor.begin()
        requested = settings.precision if replayed is None else replayed.precision
        with trimming_heap():
            model = load_model(settings)
            on_loaded(model.descriptor.scale)
            precision = resolve_precision(requested, model.descriptor, device)
            if device == "cpu" and (note := slowdown_note(precision)):
                report_phase(progress, "slow", note)
            network = build_network(model, device, precision)
        descriptor = model.descriptor
        if settings.self_ensemble:
            descriptor, network = as_ensemble(descriptor), ensemble_network(network)
        loaded = _Loaded(model, descriptor, network, runtime_identity(descriptor))
        require_valid_overrides(loaded.geometry, settings.overrides)
        if known is not None and not known.hold_for(descriptor.sha256, device, precision):
            known = None

        def finish(costs: ModelCosts) -> PreparedModel:
            return _finish(loaded, costs, known, replayed, monitor, runs_job=runs_job)

        if known is not None:
            return finish(known.costs)
        lookup = ModelCostFinder(
            network,
            descriptor.sha256,
            loaded.identity,
            loaded.geometry,
            lambda: network_weight_bytes(network, model),
            monitor.on_probe,
        )

        def measure() -> PreparedModel:
            if (costs := lookup.known(limit_bytes)) is not None:
                return finish(costs)
            with failing_beyond_container():
                costs = whole and whole.traced_costs(lookup, descriptor.size, limit_bytes)
            if whole is not None and costs is not None and whole.fits(prepared := finish(costs)):
                return prepared
            with failing_beyond_container():
                return finish(lookup.measured(limit_bytes, cancel))

        return measure() if child is None else child.measure(measure, precision, whole)


@dataclass(frozen=True)
class _Loaded:
    """A model on its device, its network, and the hash of what computes it."""

    model: Model
    descriptor: ModelDescriptor
    network: RunnableNetwork
    identity: str

    @property
    def geometry(self) -> ModelGeometry:
        return geometry_of(self.descriptor)


def _finish(
    loaded: _Loaded,
    costs: ModelCosts,
    known: PlanMeasurements | None,
    replayed: Plan | None,
    monitor: _Monitor,
    *,
    runs_job: bool,
) -> PreparedModel:
    """Return the model with its costs, in their memory format or that of the plan to replay."""
    network, device = loaded.network, loaded.network.device
    # Bounds from past runs hold for PyTorch's memory only.
    bounds: dict[RunKind, RunBounds] = {}
    if network.free_memory is None:
        bounds = {kind: run_bounds(kind, device) for kind in _RUN_KINDS}
    precision = network.precision
    if known is not None:
        bounds = {
            kind: found.model_copy(update={"current_heap": known.bounds.get(kind)})
            for kind, found in bounds.items()
        }
        extra_bytes = known.extra_resident_bytes
    else:
        extra_bytes = monitor.extra_bytes(
            device, costs.weight_bytes, f"{loaded.identity} {precision}", runs_job=runs_job
        )
    layout = costs if replayed is None else replayed
    network = to_memory_format(network, loaded.model, layout.channels_last)
    geometry = loaded.geometry
    return PreparedModel(
        loaded.descriptor,
        network,
        # Align tiles to the grid that the model pads to inside: its padding would be wasted work.
        replace(geometry, align=math.lcm(geometry.align, costs.padding_multiple)),
        costs,
        precision,
        StreamPlannerCache(network, monitor.on_capture, identity=f"{loaded.identity} {precision}"),
        bounds,
        extra_bytes,
    )


class _Monitor:
    """Progress and resident memory while a model is loaded and probed."""

    def __init__(
        self,
        model: str,
        meter: HostMemoryMeter | CudaMemoryMeter | None,
        progress: ProgressCallback | None,
        child: ChildPlanner | None,
    ) -> None:
        self._model, self._meter, self._progress, self.child = model, meter, progress, child
        self._before, self._before_probe = 0, None

    def begin(self) -> None:
        """Report the first phase, and note the resident memory."""
        report_phase(self._progress, "load", self._model)
        self._before = self._resident_bytes()

    def on_probe(self) -> None:
        """Note the resident memory, and load what only probes need."""
        from lowtide.streaming.probe.trace_memory import import_tracing_libraries

        if self.child is not None:
            self.child.before_computing()
        if self._before_probe is None:
            self._before_probe = self._resident_bytes()
        self._start_phase("probe", import_tracing_libraries)

    def on_capture(self) -> None:
        """Load what only captures need."""
        if self.child is not None:
            self.child.before_computing()
        self._start_phase("capture", import_capture_libraries)

    def extra_bytes(self, device: str, weight_bytes: int, key: str, *, runs_job: bool) -> int:
        """Return the host memory that became resident on the CPU and is not weights."""
        if self._meter is None or device != "cpu":
            return 0
        if runs_job and self._before_probe is not None:
            # Only this process holds what a probe leaves.
            return max(0, self._resident_bytes(collect=True) - self._before - weight_bytes)
        held = self._before_probe or self._resident_bytes()
        return _stable_bytes(key, max(0, held - self._before - weight_bytes))

    def _resident_bytes(self, *, collect: bool = False) -> int:
        if self._meter is None:
            return 0
        trim_heap(collect=collect)
        return self._meter.current_bytes

    def _start_phase(self, phase: Phase, load: Callable[[], object]) -> None:
        """Report a phase and load its libraries, excluded from the measured memory.

        Most runs do not need these libraries, and they are not memory of the run itself.
        """
        report_phase(self._progress, phase, self._model)
        if self._meter is not None:
            with self._meter.excluding():
                load()


def _stable_bytes(key: str, measured: int) -> int:
    """Return ``measured``, or the stored figure if it differs by little.

    A budget that an error message named has to be enough in the next run.
    """
    facts = key, *machine_facts()
    known = JsonCache().get("resident", *facts)
    if known is None or measured > known + _NOISE_BYTES:
        known = measured
        JsonCache().put("resident", *facts, value=known)
    return known


def load_model(settings: ImageSettings) -> Model:
    """Load the model of the settings; raises for one that the job does not run."""
    model = load(settings.model_name)
    facts = model.descriptor
    settings.check_model(facts)
    if facts.noise is not None:
        set_nominal_level(model.module)  # which it has to be told before it is measured
    if facts.scale < 1:
        raise ModelError(f"{facts.name} makes images smaller (×{facts.scale})")
    require_image_channels(facts.in_channels, facts.out_channels)
    if settings.denoiser is None:
        return model
    denoiser = load(settings.denoiser)
    set_nominal_level(denoiser.module)
    return prepend_denoiser(denoiser, model)


def runtime_identity(model: ModelDescriptor) -> str:
    """Return the model's hash, with the runtime's version where that is not PyTorch."""
    if model.path is None or not is_onnx(model.path):
        return model.sha256
    return f"{model.sha256} onnxruntime {version('onnxruntime')}"
