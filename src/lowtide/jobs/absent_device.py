"""Model costs on an absent device, from traces and a device profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.precision import Precision, is_eight_bits
from lowtide.jobs.build_network import ensemble_network
from lowtide.jobs.devices import gained_precision, precisions_of
from lowtide.jobs.prepare import PreparedModel, prepare
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.costs import ModelCosts, ProbePoint, TracedPoint
from lowtide.memory.prediction.roofline import roofline_seconds
from lowtide.memory.profiles import DeviceProfile
from lowtide.models import ModelDescriptor, load
from lowtide.streaming.probe.trace_memory import live_bytes_rows, trace_tile
from lowtide.streaming.specialize.cuda_graph import require_cuda_graphs
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.tile_step import DTYPES, NetworkSpec

_SIDES = (128, 256, 512, 1024)


def prepare_for_profile(
    settings: UpscaleSettings,
    profile: DeviceProfile,
    on_loaded: Callable[[int], object] = lambda scale: None,
) -> PreparedModel:
    """Return the model of ``settings`` with its costs predicted for ``profile``.

    The receptive field and the effect of the batch size are measured on the CPU once and then
    cached; memory comes from traces, seconds from the profile's rates.

    Args:
        on_loaded: As in `prepare`.

    Raises:
        ModelError: The model cannot be traced.
        UsageError: The model or the device lacks the requested precision.
    """
    if is_eight_bits(settings.precision):
        raise UsageError(
            "the memory of 8-bit layers can only be measured on the device itself",
            hint="--device auto or cpu, or another --precision",
        )
    if settings.cuda_graphs:
        require_cuda_graphs(profile.kind)
    in_fp32 = {"precision": "fp32", "cuda_graphs": False}
    here = prepare(settings.model_copy(update=in_fp32), device="cpu", on_loaded=on_loaded)
    precision = _precision(settings.precision, here.descriptor, profile)
    network = dataclasses.replace(
        here.network, device=profile.name, precision=precision, channels_last=False
    )
    weight_bytes = here.costs.weight_bytes  # fp32 weights are resident too: the reference
    if precision != "fp32":
        low = load(settings.model_name).lower(DTYPES[precision])
        network = dataclasses.replace(network, forward=low.module)
        if settings.self_ensemble:
            network = ensemble_network(network)
        weight_bytes += low.descriptor.weight_bytes
    costs = _costs(here, network, profile, weight_bytes)
    return PreparedModel(here.descriptor, network, here.shape, costs, precision, here.programs)


def _costs(
    here: PreparedModel, network: NetworkSpec, profile: DeviceProfile, weight_bytes: int
) -> ModelCosts:
    shape = here.shape
    points, traced = [], []
    for side in sorted({round_up(max(side, shape.minimum), shape.align) for side in _SIDES}):
        told = trace_tile(network, side, side, device=profile)
        if told.trace is None:
            raise ModelError(
                f"{here.descriptor.name} cannot be traced, so its memory on {profile.title}"
                " cannot be predicted",
                hint="run `lowtide plan` on that machine, where it is measured instead",
            )
        live = sum(live_bytes_rows(network, told.ledger))
        kept = next(row.value for row in told.ledger if row.name == "allocator")
        seconds = roofline_seconds(told.trace, profile)
        traced.append(TracedPoint(pixels=side * side, peak_bytes=live, reused=()))
        points.append(
            ProbePoint(
                pixels=side * side, peak_bytes=live, resident_bytes=live + kept, seconds=seconds
            )
        )
    return here.costs.model_copy(
        update={
            "device": profile.name,
            "precision": network.precision,
            "channels_last": False,
            "weight_bytes": weight_bytes,
            "context_bytes": profile.context_bytes,
            "points": tuple(points),
            "traced": tuple(traced),
        }
    )


def _precision(
    wanted: Literal["auto"] | Precision, model: ModelDescriptor, profile: DeviceProfile
) -> Precision:
    """Return the requested precision, or the lowest that device and model gain from."""
    if wanted == "auto":
        return "fp32" if profile.kind == "cpu" else gained_precision(model, profile.capability)
    allowed = precisions_of(model)
    if wanted not in allowed or wanted not in profile.supports:
        where = model.name if wanted not in allowed else profile.title
        raise UsageError(f"{where} does not run in {wanted}", hint="--precision auto")
    return wanted
