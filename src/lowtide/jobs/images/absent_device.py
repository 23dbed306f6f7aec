"""Models with the costs that a device which is not here would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.option import Precision
from lowtide.core.progress import ProgressCallback
from lowtide.jobs.engine.devices import castable_precisions, preferred_precision
from lowtide.jobs.images.build_network import ensemble_network, to_memory_format
from lowtide.jobs.images.prepare import load_model, load_prepared_model
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.memory.costs import ModelCosts, ProbePoint, TracedPoint
from lowtide.memory.prediction.operator_costs import roofline_seconds
from lowtide.memory.profiles import DeviceProfile
from lowtide.models import ModelDescriptor
from lowtide.streaming.probe.trace_memory import live_bytes_rows, predict_tile_memory
from lowtide.streaming.specialize import require_cuda_graphs
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.tile_step import DTYPES, takes_channels_last

_SIDES = (128, 256, 512, 1024)


def load_for_profile(
    settings: ImageSettings,
    profile: DeviceProfile,
    progress: ProgressCallback | None = None,
    on_loaded: Callable[[int], object] = lambda scale: None,
) -> PreparedModel:
    """Return the model of ``settings`` with its costs predicted for ``profile``.

    The receptive field and the effect of the batch size are measured on the CPU once and then
    cached; memory comes from traces, seconds from the profile's rates.

    Args:
        progress: As in `load_prepared_model`.
        on_loaded: As in `load_prepared_model`.

    Raises:
        ModelError: The model cannot be traced.
        UsageError: The model or the device lacks the requested precision.
    """
    if settings.cuda_graphs:
        require_cuda_graphs(profile.kind)
    reference = load_prepared_model(
        replace(settings, precision="fp32", cuda_graphs=False),
        device="cpu",
        progress=progress,
        on_loaded=on_loaded,
    )
    precision = _precision(settings.precision, reference.descriptor, profile)
    network = replace(
        reference.network, device=profile.name, precision=precision, channels_last=False
    )
    weight_bytes = reference.costs.weight_bytes  # fp32 weights are resident too: the reference
    if precision != "fp32":
        low = load_model(settings).to_low_precision(DTYPES[precision])
        network = replace(network, forward=low.module)
        if settings.self_ensemble:
            network = ensemble_network(network)
        network = to_memory_format(network, low, takes_channels_last(network))
        weight_bytes += low.descriptor.weight_bytes
    costs = _costs(reference, network, profile, weight_bytes)
    return replace(
        reference,
        network=network,
        costs=costs,
        precision=precision,
        bounds={},
    )


def _costs(
    reference: PreparedModel, network: RunnableNetwork, profile: DeviceProfile, weight_bytes: int
) -> ModelCosts:
    shape = reference.geometry
    points, traced = [], []
    for side in sorted({round_up(max(side, shape.minimum), shape.align) for side in _SIDES}):
        tile_trace = predict_tile_memory(network, side, side, device=profile)
        if tile_trace.trace is None:
            raise ModelError(
                f"{reference.descriptor.name} cannot be traced, so its memory on {profile.title}"
                " cannot be predicted",
                hint="run `lowtide plan` on that machine, where it is measured instead",
            )
        live = sum(live_bytes_rows(network, tile_trace.ledger))
        kept = next(row.value for row in tile_trace.ledger if row.name == "allocator")
        seconds = roofline_seconds(tile_trace.trace, profile)
        traced.append(TracedPoint(pixels=side * side, peak_bytes=live, reused_blocks=()))
        points.append(
            ProbePoint(
                pixels=side * side, peak_bytes=live, resident_bytes=live + kept, seconds=seconds
            )
        )
    return reference.costs.model_copy(
        update={
            "device": profile.name,
            "precision": network.precision,
            "channels_last": network.channels_last,
            "weight_bytes": weight_bytes,
            "context_bytes": profile.context_bytes,
            "points": tuple(points),
            "traced_points": tuple(traced),
        }
    )


def _precision(
    requested: Literal["auto"] | Precision, model: ModelDescriptor, profile: DeviceProfile
) -> Precision:
    """Return the requested precision, or the lowest that device and model gain from."""
    if requested == "auto":
        return "fp32" if profile.kind == "cpu" else preferred_precision(model, profile.capability)
    allowed = castable_precisions(model)
    if requested not in allowed or requested not in profile.supports:
        where = model.name if requested not in allowed else profile.title
        raise UsageError(f"{where} does not run in {requested}", hint="--precision auto")
    return requested
