"""Measurement of a model's receptive field, memory and time by a few tiny runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.memory.costs import ModelCosts, ProbePoint, TracedPoint
from lowtide.memory.meter import cuda_context_bytes
from lowtide.memory.oom import trim_allocators
from lowtide.streaming.probe.receptive_field import RECEPTIVE_FIELD_SIDES, measure_receptive_field
from lowtide.streaming.probe.small_runs import (
    MAX_PROBE_SECONDS,
    float_tile_runner,
    live_peak,
    probe_point,
    random_tile,
    tile_work,
)
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.network import Forward, RunnableNetwork
from lowtide.streaming.tiles.tile_step import in_memory_format

# A tile that would take more is not run only to be measured.
_MAX_PROBE_BYTES = 256 << 20
_SIDES = {"cpu": (64, 128, 256, 512), "cuda": (128, 256, 512, 1024)}


def probe_costs(
    network: RunnableNetwork,
    *,
    sha256: str,
    weight_bytes: int,
    align: int,
    minimum: int,
    limit_bytes: int | None = None,
    cancel: Cancel = None,
) -> tuple[ModelCosts, bool]:
    """Measure receptive field, peak memory and seconds of ``network``.

    On the CPU memory and work are traced, and nothing is timed: that is done in passing, by the
    first real run. Elsewhere, and where a network cannot be traced, two or three tiny tiles run
    through the real step, of the smallest size that the model accepts up to 512 pixels (1024 on
    CUDA); fewer if the model is slow, or if a run would take more than ``limit_bytes``.

    Returns:
        The costs, and whether all of them were measured rather than cut short by the limit.
    """
    kind = torch.device(network.device).type
    sides = sorted({_fit(side, align, minimum) for side in _SIDES[kind]})
    traced, multiple = (), 1
    network = in_memory_format(network)
    if _is_traced(network):
        traced, multiple = _trace(network, align, minimum, limit_bytes)
    # The first run only scales the others: its memory is enough.
    smallest_bytes = (
        traced[0].peak_bytes if traced else live_peak(network, tile_work(network, sides[0]))
    )

    def fits(side: int) -> bool:
        return limit_bytes is None or smallest_bytes * (side / sides[0]) ** 2 <= limit_bytes

    raise_if_cancelled(cancel)
    searched = [side for side in RECEPTIVE_FIELD_SIDES if side <= sides[0] or fits(side)]
    receptive_field = measure_receptive_field(
        _fp32_forward(network),
        channels=network.in_channels,
        scale=network.scale,
        align=align,
        minimum=minimum,
        device=network.device,
        sides=searched,
        propagates_nan=network.free_memory is None,
    )
    trim_heap(collect=True)
    within, points = True, []
    if not traced:
        points, within = _points(network, sides, fits, cancel)
    costs = ModelCosts(
        **known_costs(network, sha256, weight_bytes),
        batchable=_batches_agree(network, sides[0]),
        context_bytes=0 if network.device == "cpu" else cuda_context_bytes(network.device),
        receptive_field=receptive_field.radius,
        receptive_field_search_limit=receptive_field.search_limit,
        padding_multiple=multiple,
        points=tuple(points),
        traced_points=traced,
    )
    return costs, within and all(fits(side) for side in RECEPTIVE_FIELD_SIDES)


def trace_whole_costs(
    network: RunnableNetwork,
    size: tuple[int, int],
    *,
    sha256: str,
    weight_bytes: int,
    align: int,
    minimum: int,
    limit_bytes: int,
) -> ModelCosts | None:
    """Return what a run of ``network`` on a whole image of ``size`` (H, W) takes, by a trace.

    Nothing is run but operators whose workspace has to be measured, within ``limit_bytes``. The
    result says nothing about tiles. None for a network that cannot be traced.
    """
    return _traced_costs(
        network, sha256, weight_bytes, lambda one: _trace(one, align, minimum, limit_bytes, size)
    )


def trace_band_costs(
    network: RunnableNetwork,
    pixels: int,
    *,
    sha256: str,
    weight_bytes: int,
    align: int,
    minimum: int,
    limit_bytes: int | None,
) -> ModelCosts | None:
    """Return what bands of ``network`` take on images of up to ``pixels``, by traces.

    As `trace_whole_costs` otherwise.
    """
    return _traced_costs(
        network,
        sha256,
        weight_bytes,
        lambda one: _trace(one, align, minimum, limit_bytes, up_to=pixels),
    )


def _traced_costs(
    network: RunnableNetwork,
    sha256: str,
    weight_bytes: int,
    trace: Callable[[RunnableNetwork], tuple[tuple[TracedPoint, ...], int]],
) -> ModelCosts | None:
    if not _is_traced(network):
        return None
    network = in_memory_format(network)
    traced, multiple = trace(network)
    if len(traced) < 2:
        return None
    return ModelCosts(
        **known_costs(network, sha256, weight_bytes),
        batchable=False,
        receptive_field=None,
        receptive_field_search_limit=0,
        padding_multiple=multiple,
        traced_points=traced,
    )


def known_costs(network: RunnableNetwork, sha256: str, weight_bytes: int) -> dict[str, Any]:
    """Return the fields of `ModelCosts` that need no measuring."""
    return {
        "sha256": sha256,
        "device": network.device,
        "precision": network.precision,
        "weight_bytes": weight_bytes,
        "channels_last": network.channels_last,
        "threads": torch.get_num_threads(),
    }


def _is_traced(network: RunnableNetwork) -> bool:
    """Return whether traces predict the memory: on CUDA the allocator's own statistics do."""
    return network.device == "cpu" and network.free_memory is None


def _trace(
    network: RunnableNetwork,
    align: int,
    minimum: int,
    limit_bytes: int | None,
    size: tuple[int, int] | None = None,
    up_to: int | None = None,
) -> tuple[tuple[TracedPoint, ...], int]:
    """Return the traced points, and the multiple that the network pads to unless for a size.

    ``size`` and ``up_to`` are those of `trace_points`.
    """
    # Imported here because a run with cached costs traces nothing.
    from lowtide.memory.tracing.fake import clear_shape_caches
    from lowtide.streaming.probe.trace_memory import TileTracer, padding_multiple, trace_points

    if not isinstance(network.forward, torch.nn.Module):
        return (), align
    traces = TileTracer(network)
    traced = trace_points(
        network,
        align=align,
        minimum=minimum,
        limit_bytes=limit_bytes,
        size=size,
        up_to=up_to,
        traces=traces,
    )
    multiple = padding_multiple(network, align=align, traces=traces) if size is None else 1
    del traces
    clear_shape_caches()
    trim_heap(collect=True)
    return traced, multiple


def _points(
    network: RunnableNetwork, sides: Sequence[int], fits: Callable[[int], bool], cancel: Cancel
) -> tuple[list[ProbePoint], bool]:
    """Return at least two measured points, and whether no limit cut them short."""
    points: list[ProbePoint] = []
    for side in sides:
        raise_if_cancelled(cancel)
        if len(points) >= 2:
            if points[-1].seconds * (side * side / points[-1].pixels) > MAX_PROBE_SECONDS:
                break  # under any limit
            if not fits(side):
                return points, False
        # Three points tell scores, which grow with the square of the pixels.
        if network.device == "cpu" and len(points) >= 3:
            growth = points[-1].peak_bytes / max(1, points[-2].peak_bytes)
            if growth * points[-1].peak_bytes > _MAX_PROBE_BYTES:
                break
        points.append(probe_point(network, side))
        trim_allocators(network.device, collect=True)
    if len(points) < 2:
        # A model of one size only: a second point half as large puts the line through 0.
        only = points[0]
        points.insert(
            0,
            ProbePoint(
                pixels=only.pixels // 2,
                peak_bytes=only.peak_bytes // 2,
                resident_bytes=only.resident_bytes // 2,
                seconds=only.seconds / 2,
            ),
        )
    return points, all(fits(side) for side in sides[: len(points)])


def _batches_agree(network: RunnableNetwork, side: int) -> bool:
    """Return whether two tiles in one batch give the results of each alone.

    Some models mix the images of a batch.
    """
    step = float_tile_runner(network)
    pair = [random_tile(network, side, seed) for seed in (1, 2)]
    try:
        batched = step(pair)
    except (RuntimeError, ValueError, IndexError):  # written for a batch of one
        return False
    single = np.concatenate([step([tile]) for tile in pair])
    tolerance = 1e-5 if network.precision == "fp32" else 2e-2
    return bool(abs(batched - single).max() <= tolerance)


def _fit(side: int, align: int, minimum: int) -> int:
    return round_up(max(side, minimum), align)


def _fp32_forward(network: RunnableNetwork) -> Forward:
    """Return the forward in fp32, where rounding cannot hide the receptive field.

    The receptive field depends on the structure only.
    """
    exact = network.make_fp32_forward
    return network.forward if exact is None else exact()
