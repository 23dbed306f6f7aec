"""From names to something that can run: a model on its device, and its measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from lowtide.core.errors import ModelError, OutOfMemoryError
from lowtide.core.heap import trimming_heap
from lowtide.core.precision import Precision, is_eight_bits
from lowtide.core.progress import Cancel
from lowtide.core.signal import ImageInfo
from lowtide.jobs.build_network import (
    build_network,
    ensemble_network,
    in_memory_format,
    network_weight_bytes,
)
from lowtide.jobs.devices import resolve_precision
from lowtide.jobs.report import versions
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.cache import CostStore, cache_folder
from lowtide.memory.costs import ModelCosts
from lowtide.memory.oom import is_out_of_memory
from lowtide.memory.plan import Plan
from lowtide.memory.prediction.calibration import RunBounds, bounds_of_runs
from lowtide.models import Model, ModelDescriptor, load, names
from lowtide.models.model_files import is_onnx
from lowtide.models.onnx_model import OnnxModel
from lowtide.models.onnx_providers import Provider, ProviderName
from lowtide.models.onnx_runtime import load_runtime
from lowtide.models.quantize import torchao_scheme
from lowtide.models.self_ensemble import as_ensemble
from lowtide.models.spandrel_files import families
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry
from lowtide.streaming.planner.program_cache import ProgramCache
from lowtide.streaming.probe.measure_costs import probe_costs
from lowtide.streaming.specialize.cuda_graph import require_cuda_graphs
from lowtide.streaming.specialize.shape_specialized import SpecializationGain
from lowtide.streaming.specialize.torch_compile import CompileCache
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Of the budget, for rows waiting to be run or written.
_ROW_SHARE = 0.03


@dataclass
class PreparedModel:
    """A model on its device, with what it costs.

    ``beside_bytes`` is what became resident with it on the host and is no weight: kernels that were
    made while its parts were compared, for one. ``others`` are the same on further devices;
    ``compiled`` are by the shape that they are for, and ``compiling`` is what was found out of that
    on this machine.
    """

    descriptor: ModelDescriptor
    network: NetworkSpec
    shape: ModelGeometry
    costs: ModelCosts
    precision: Precision
    programs: ProgramCache
    tiled: RunBounds = field(default_factory=RunBounds)
    streamed: RunBounds = field(default_factory=RunBounds)
    beside_bytes: int = 0
    others: tuple[NetworkSpec, ...] = ()
    compiling: SpecializationGain | None = None
    compiled: dict[tuple[int, ...], NetworkSpec] = field(default_factory=dict)
    recorded: dict[tuple[int, ...], NetworkSpec] = field(default_factory=dict)

    def padded(self, info: ImageInfo) -> tuple[int, int]:
        """(height, width) that the model's size rule makes of an image."""
        rows, columns = self.descriptor.size.padding(info.height, info.width)
        return info.height + rows, info.width + columns

    def picture(
        self,
        info: ImageInfo,
        codecs: tuple[tuple[int, int], ...],
        scratch_bytes: int,
        budget: Budget,
    ) -> ImageTask:
        """An image as pricing wants it, padded by the model's size rule; ``codecs`` are (usual,
        most) bytes that reading and writing its formats take."""
        row_bytes = int(budget.host_bytes * _ROW_SHARE)
        easy_bytes = budget.device_bytes // 4
        return ImageTask(
            info,
            self.padded(info),
            codecs,
            scratch_bytes,
            row_bytes,
            easy_bytes,
            self.tiled,
            self.streamed,
            self.beside_bytes,
        )


def preload_libraries(settings: UpscaleSettings) -> None:
    """Load what the job computes with, before a meter takes its baseline."""
    versions(settings.model_name)
    if is_onnx(settings.model_name):
        load_runtime()
        _provider(settings).require()
    elif settings.model_name not in names():
        families()
    if is_eight_bits(settings.precision):
        torchao_scheme(settings.precision)


def _provider(settings: UpscaleSettings) -> Provider:
    return Provider(settings.provider, cache_folder() / "tensorrt")


def prepare(
    settings: UpscaleSettings,
    *,
    device: str,
    costs: ModelCosts | None = None,
    limit_bytes: int | None = None,
    on_probe: Callable[[], None] | None = None,
    cancel: Cancel = None,
    replayed: Plan | None = None,
    on_loaded: Callable[[int], object] = lambda scale: None,
) -> PreparedModel:
    """Load the model and learn its costs: from ``costs`` if they are its, the store, or a probe.

    Precision and memory layout are those of ``replayed``, where a plan is run again.

    A probe stays below ``limit_bytes`` (rounded down to a power of two, so that similar limits
    share what they learn); ``on_probe`` is called before one, and ``on_loaded`` before anything is
    measured, with the model's scale: what it raises ends this. Raises `ModelError`, `UsageError`
    and `OutOfMemoryError`.
    """
    limit = None if limit_bytes is None else 1 << (limit_bytes.bit_length() - 1)
    try:
        return _prepare(settings, device, costs, limit, on_probe, cancel, replayed, on_loaded)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out while {settings.model_name} was loaded and measured",
            hint="close other programs, or pass a smaller --budget so that less is tried",
        ) from error


def _prepare(
    settings: UpscaleSettings,
    device: str,
    costs: ModelCosts | None,
    limit_bytes: int | None,
    on_probe: Callable[[], None] | None,
    cancel: Cancel,
    replayed: Plan | None,
    on_loaded: Callable[[int], object],
) -> PreparedModel:
    if settings.cuda_graphs:
        require_cuda_graphs(device)
    wanted = settings.precision if replayed is None else replayed.precision
    with trimming_heap():
        model = _loaded(settings)
        on_loaded(model.descriptor.scale)
        precision = resolve_precision(wanted, model.descriptor, device)
        network = build_network(model, device, precision)
    descriptor = model.descriptor
    if settings.self_ensemble:
        descriptor, network = as_ensemble(descriptor), ensemble_network(network)
    shape = ModelGeometry(
        scale=descriptor.scale,
        in_channels=descriptor.in_channels,
        out_channels=descriptor.out_channels,
        align=descriptor.size.multiple_of,
        minimum=descriptor.size.minimum,
        square=descriptor.size.square,
        tileable=descriptor.tiling != "internal",
    )
    same = (descriptor.sha256, device, precision)
    if costs is None or (costs.sha256, costs.device, costs.precision) != same:
        store, key = (
            CostStore(),
            (runtime_identity(descriptor, settings.provider), device, precision),
        )
        full, cut = store.key(*key), store.key(*key, limit_bytes)
        costs = store.get(full) or store.get(cut)
        if costs is None:
            if on_probe is not None:
                on_probe()
            costs, complete = probe_costs(
                network,
                sha256=descriptor.sha256,
                weight_bytes=network_weight_bytes(network, model),
                align=shape.align,
                minimum=shape.minimum,
                limit_bytes=limit_bytes,
                cancel=cancel,
            )
            store.put(full if complete else cut, costs)
    # Tiles on the grid that the model pads to inside: what it would add would only be run.
    shape = replace(shape, align=math.lcm(shape.align, costs.grain))
    layout = costs if replayed is None else replayed
    network = in_memory_format(network, model, layout.channels_last)
    # Bounds that past runs call for are of PyTorch's memory.
    own = network.let_go is None
    return PreparedModel(
        descriptor,
        network,
        shape,
        costs,
        precision,
        ProgramCache(network),
        bounds_of_runs("tiled", device) if own else RunBounds(),
        bounds_of_runs("streamed", device) if own else RunBounds(),
        compiling=CompileCache(device).get(descriptor.sha256, precision) if own else None,
    )


def _loaded(settings: UpscaleSettings) -> Model:
    model = load(settings.model_name)
    if isinstance(model, OnnxModel):
        model.use(_provider(settings))
    facts = model.descriptor
    if facts.scale < 1:
        raise ModelError(f"{facts.name} makes images smaller (×{facts.scale})")
    return model


def runtime_identity(model: ModelDescriptor, provider: ProviderName = "cpu") -> str:
    """The model's hash; with the version of the runtime where that is not PyTorch."""
    if model.path is None or not is_onnx(model.path):
        return model.sha256
    by = "" if provider == "cpu" else f" {provider}"
    return f"{model.sha256} onnxruntime {version('onnxruntime')}{by}"
