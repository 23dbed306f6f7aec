"""Load a model onto its device and get its costs from the cache or a probe."""

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
    network_weight_bytes,
    to_memory_format,
)
from lowtide.jobs.devices import resolve_precision
from lowtide.jobs.report import versions
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.cache import CostCache, cache_folder
from lowtide.memory.costs import ModelCosts
from lowtide.memory.oom import is_out_of_memory
from lowtide.memory.plan import Plan
from lowtide.memory.prediction.calibration import RunBounds, run_bounds
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

# Share of the budget for rows that wait to be run or written.
_ROW_SHARE = 0.03


@dataclass
class PreparedModel:
    """A model on its device with its measured costs.

    ``extra_resident_bytes`` is host memory that became resident with it and is not weights, such as
    kernels that were built while its parts were compared. ``replicas`` are copies of the network on
    further devices. ``compiled_networks`` and ``graph_networks`` are specialized networks by tile
    shape, and ``compile_gain`` is what this machine has measured about compiling.
    """

    descriptor: ModelDescriptor
    network: NetworkSpec
    geometry: ModelGeometry
    costs: ModelCosts
    precision: Precision
    programs: ProgramCache
    tiled_bounds: RunBounds = field(default_factory=RunBounds)
    streamed_bounds: RunBounds = field(default_factory=RunBounds)
    extra_resident_bytes: int = 0
    replicas: tuple[NetworkSpec, ...] = ()
    compile_gain: SpecializationGain | None = None
    compiled_networks: dict[tuple[int, ...], NetworkSpec] = field(default_factory=dict)
    graph_networks: dict[tuple[int, ...], NetworkSpec] = field(default_factory=dict)

    def padded_size(self, info: ImageInfo) -> tuple[int, int]:
        """Return (H, W) of an image padded by the model's size rule."""
        rows, columns = self.descriptor.size.padding(info.height, info.width)
        return info.height + rows, info.width + columns

    def image_task(
        self,
        info: ImageInfo,
        codecs: tuple[tuple[int, int], ...],
        scratch_bytes: int,
        budget: Budget,
    ) -> ImageTask:
        """Return the `ImageTask` of an image, padded by the model's size rule.

        ``codecs`` are (usual, upper) bytes that reading and writing its file formats take.
        """
        row_bytes = int(budget.host_bytes * _ROW_SHARE)
        easy_bytes = budget.device_bytes // 4
        return ImageTask(
            info,
            self.padded_size(info),
            codecs,
            scratch_bytes,
            row_bytes,
            easy_bytes,
            self.tiled_bounds,
            self.streamed_bounds,
            self.extra_resident_bytes,
        )


def preload_libraries(settings: UpscaleSettings) -> None:
    """Import the libraries that the job needs, before a meter takes its baseline."""
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
    """Load the model and get its costs from ``costs``, the cache or a probe.

    Args:
        costs: Known costs, used if they belong to this model, device and precision.
        limit_bytes: Limit of the probe's memory, rounded down to a power of two, so that similar
            limits share a cache entry.
        on_probe: Called before a probe.
        replayed: Plan to run again, which sets precision and memory format.
        on_loaded: Called with the model's scale before anything is measured; its exceptions
            propagate.

    Raises:
        ModelError: The model cannot be loaded or run.
        UsageError: The settings do not suit the model or the device.
        OutOfMemoryError: Memory ran out while the model was loaded or probed.
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
    requested = settings.precision if replayed is None else replayed.precision
    with trimming_heap():
        model = _loaded(settings)
        on_loaded(model.descriptor.scale)
        precision = resolve_precision(requested, model.descriptor, device)
        network = build_network(model, device, precision)
    descriptor = model.descriptor
    if settings.self_ensemble:
        descriptor, network = as_ensemble(descriptor), ensemble_network(network)
    geometry = ModelGeometry(
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
            CostCache(),
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
                align=geometry.align,
                minimum=geometry.minimum,
                limit_bytes=limit_bytes,
                cancel=cancel,
            )
            store.put(full if complete else cut, costs)
    # Align tiles to the grid that the model pads to inside: its padding would be wasted work.
    geometry = replace(geometry, align=math.lcm(geometry.align, costs.padding_multiple))
    layout = costs if replayed is None else replayed
    network = to_memory_format(network, model, layout.channels_last)
    # Bounds from past runs hold for PyTorch's memory only.
    own = network.free_memory is None
    return PreparedModel(
        descriptor,
        network,
        geometry,
        costs,
        precision,
        ProgramCache(network),
        run_bounds("tiled", device) if own else RunBounds(),
        run_bounds("streamed", device) if own else RunBounds(),
        compile_gain=CompileCache(device).get(descriptor.sha256, precision) if own else None,
    )


def _loaded(settings: UpscaleSettings) -> Model:
    model = load(settings.model_name)
    if isinstance(model, OnnxModel):
        model.use_provider(_provider(settings))
    facts = model.descriptor
    if facts.scale < 1:
        raise ModelError(f"{facts.name} makes images smaller (×{facts.scale})")
    return model


def runtime_identity(model: ModelDescriptor, provider: ProviderName = "cpu") -> str:
    """Return the model's hash, with the runtime's version where that is not PyTorch."""
    if model.path is None or not is_onnx(model.path):
        return model.sha256
    by = "" if provider == "cpu" else f" {provider}"
    return f"{model.sha256} onnxruntime {version('onnxruntime')}{by}"
