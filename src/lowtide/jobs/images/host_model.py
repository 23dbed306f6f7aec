"""Prepare a model that runs without PyTorch: its network, and what it takes by its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowtide.core.errors import ModelError
from lowtide.core.progress import ProgressCallback, report_phase
from lowtide.core.torch_state import thread_count
from lowtide.jobs.images.adapter import require_image_channels
from lowtide.jobs.images.prepared import PreparedModel, geometry_of
from lowtide.jobs.images.run_clock import with_clock_ratio
from lowtide.jobs.images.settings import ImageSettings
from lowtide.memory.costs import ModelCosts, TracedPoint
from lowtide.models.description import describe_model
from lowtide.models.lowtide_files import read_graph
from lowtide.models.ncnn_graph import NcnnGraph
from lowtide.streaming.planner.tile_candidates import require_valid_overrides
from lowtide.streaming.tiles.network import RunnableNetwork

# Bytes of a run for each value that its largest layer reads and writes, and for each of the result:
# padded copies and Winograd's transforms; the array, its conversion and a copy. Measured for widths
# of 32 and 64 channels and tiles of 64 to 384 pixels: 0.87 to 1.04 of this.
_LAYER_BYTES, _RESULT_BYTES = 5 * 4, 3 * 4
_COSTED_SIDES = 64, 1024


def load_host_model(
    settings: ImageSettings,
    *,
    progress: ProgressCallback | None = None,
    on_loaded: Callable[[int], object] = lambda scale: None,
) -> PreparedModel:
    """Load a model for ncnn on the CPU; what it takes follows from its layers.

    Raises:
        ModelError: The model cannot be loaded, or ncnn does not run it.
        UsageError: The settings do not suit the model.
    """
    from lowtide.runtimes.ncnn_network import NcnnNetwork

    report_phase(progress, "load", settings.model_name)
    descriptor = describe_model(settings.model_name)
    if descriptor is None:
        raise ModelError(f"{settings.model_name} is run by PyTorch alone", hint="--runtime torch")
    path = Path(descriptor.path or "")
    settings.check_model(descriptor)
    require_image_channels(descriptor.in_channels, descriptor.out_channels)
    on_loaded(descriptor.scale)
    graph, reach = read_graph(path)
    costs = _costs_of(graph, descriptor.sha256, reach)
    geometry = geometry_of(descriptor)
    require_valid_overrides(geometry, settings.overrides)
    network = RunnableNetwork(
        forward=NcnnNetwork(graph, thread_count()),
        scale=descriptor.scale,
        in_channels=descriptor.in_channels,
        out_channels=descriptor.out_channels,
        runtime="ncnn",
    )
    return PreparedModel(
        replace(descriptor, weight_bytes=costs.weight_bytes), network, geometry, costs, "fp32"
    )


def _costs_of(graph: NcnnGraph, sha256: str, reach: int) -> ModelCosts:
    """Return what a graph takes, by the sizes of its layers."""
    per_pixel = _LAYER_BYTES * graph.layer_values + _RESULT_BYTES * graph.result_values
    points = tuple(
        TracedPoint(
            pixels=side**2,
            peak_bytes=round(per_pixel * side**2),
            reused_blocks=(),
            multiply_adds=round(graph.multiply_adds * side**2),
        )
        for side in _COSTED_SIDES
    )
    costs = ModelCosts(
        sha256=sha256,
        device="cpu",
        precision="fp32",
        weight_bytes=3 * len(graph.weights),  # as they are, and transformed for Winograd
        channels_last=False,
        batchable=True,
        receptive_field=reach,
        receptive_field_search_limit=reach + 1,
        threads=thread_count(),
        traced_points=points,
    )
    return with_clock_ratio(costs)
