"""Measurement of a model's receptive field, memory and time by a few tiny runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.reach import ReceptiveField
from lowtide.memory.costs import ModelCosts, ProbePoint
from lowtide.memory.meter import cuda_context_bytes
from lowtide.memory.oom import trim_allocators
from lowtide.streaming.probe.receptive_field import RECEPTIVE_FIELD_SIDES, measure_receptive_field
from lowtide.streaming.probe.small_runs import (
    MAX_PROBE_SECONDS,
    best_seconds,
    live_peak,
    probe_point,
    random_tile,
    tile_step,
    tile_work,
)
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.tile_step import Forward, NetworkSpec

_SIDES = {"cpu": (64, 128, 256, 512), "cuda": (128, 256, 512, 1024)}
_MEMORY_FORMAT_SIDE = 128
# Ratio of times below which a model leaves the memory format it was written in.
_MEMORY_FORMAT_GAIN = 0.92


def probe_costs(
    network: NetworkSpec,
    *,
    sha256: str,
    weight_bytes: int,
    align: int,
    minimum: int,
    limit_bytes: int | None = None,
    cancel: Cancel = None,
) -> tuple[ModelCosts, bool]:
    """Measure receptive field, peak memory and seconds of ``network``.

    Runs two or three tiny tiles through the real step, and chooses the memory format, see
    `_choose_memory_format`. Sizes are the smallest that the model accepts, up to 512 pixels (1024
    on CUDA); fewer if the model is slow, or if a run would take more than ``limit_bytes``.

    Returns:
        The costs, and whether all of them were measured rather than cut short by the limit.
    """
    kind = torch.device(network.device).type
    sides = sorted({_fit(side, align, minimum) for side in _SIDES[kind]})
    # The first run only scales the others: its memory and its time are enough.
    started = time.perf_counter()
    smallest_bytes = live_peak(network, tile_work(network, sides[0]))
    smallest_seconds = time.perf_counter() - started

    def fits(side: int) -> bool:
        return limit_bytes is None or smallest_bytes * (side / sides[0]) ** 2 <= limit_bytes

    check_cancel(cancel)
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
    # A slow model is measured where it takes least: minutes of probing would save seconds.
    wide = _fit(_MEMORY_FORMAT_SIDE, align, minimum)
    is_fast = smallest_seconds * (wide / sides[0]) ** 2 < MAX_PROBE_SECONDS / 4
    network = _choose_memory_format(network, wide if is_fast else sides[0])
    points, within = _points(network, sides, fits, cancel)
    costs = _costs(network, sha256, weight_bytes, sides[0], receptive_field, points)
    if kind == "cpu" and network.free_memory is None:
        # On CUDA the allocator's statistics of real runs are more accurate.
        costs = _with_traced_points(costs, network, align, minimum, limit_bytes)
    return costs, within and all(fits(side) for side in RECEPTIVE_FIELD_SIDES)


def _points(
    network: NetworkSpec, sides: Sequence[int], fits: Callable[[int], bool], cancel: Cancel
) -> tuple[list[ProbePoint], bool]:
    """Return at least two measured points, and whether no limit cut them short."""
    points: list[ProbePoint] = []
    for side in sides:
        check_cancel(cancel)
        if len(points) >= 2:
            if points[-1].seconds * (side * side / points[-1].pixels) > MAX_PROBE_SECONDS:
                break  # under any limit
            if not fits(side):
                return points, False
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


def _costs(
    network: NetworkSpec,
    sha256: str,
    weight_bytes: int,
    side: int,
    receptive_field: ReceptiveField,
    points: list[ProbePoint],
) -> ModelCosts:
    return ModelCosts(
        sha256=sha256,
        device=network.device,
        precision=network.precision,
        weight_bytes=weight_bytes,
        channels_last=network.channels_last,
        threads=torch.get_num_threads(),
        batchable=_batches_agree(network, side),
        context_bytes=0 if network.device == "cpu" else cuda_context_bytes(network.device),
        receptive_field=receptive_field.radius,
        receptive_field_search_limit=receptive_field.search_limit,
        points=tuple(points),
    )


def _with_traced_points(
    costs: ModelCosts, network: NetworkSpec, align: int, minimum: int, limit_bytes: int | None
) -> ModelCosts:
    """Return ``costs`` with the memory that traces predict for larger runs."""
    # Imported here because a run with cached costs traces nothing.
    from lowtide.memory.tracing.fake import clear_shape_caches
    from lowtide.streaming.probe.trace_memory import padding_multiple, trace_points

    traced = trace_points(network, align=align, minimum=minimum, limit_bytes=limit_bytes)
    multiple = padding_multiple(network, align=align)
    clear_shape_caches()
    trim_heap(collect=True)
    return costs.model_copy(update={"traced_points": traced, "padding_multiple": multiple})


def _choose_memory_format(network: NetworkSpec, side: int) -> NetworkSpec:
    """Return ``network`` with the memory format of its inputs chosen.

    The format changes the rounding, so on the CPU the choice must not depend on timing:
    channels-last for every network with convolutions, of which 18 kinds took 0.7 to 1.0 of the
    time. On a GPU it is chosen where it is clearly faster there.
    """
    if network.free_memory is not None:
        return network  # it takes one memory format, and inputs in another would be copied
    if network.device == "cpu":
        forward = network.forward
        weights = forward.parameters() if isinstance(forward, torch.nn.Module) else ()
        return dataclasses.replace(network, channels_last=any(one.dim() == 4 for one in weights))
    tile, seconds = random_tile(network, side), []
    for channels_last in (False, True):
        candidate = dataclasses.replace(network, channels_last=channels_last)
        step = tile_step(candidate)
        seconds.append(best_seconds(lambda step=step: step([tile]), network.device))
    return dataclasses.replace(network, channels_last=seconds[1] < seconds[0] * _MEMORY_FORMAT_GAIN)


def _batches_agree(network: NetworkSpec, side: int) -> bool:
    """Return whether two tiles in one batch give the results of each alone.

    Some models mix the images of a batch.
    """
    step = tile_step(network)
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


def _fp32_forward(network: NetworkSpec) -> Forward:
    """Return the forward in fp32, where rounding cannot hide the receptive field.

    The receptive field depends on the structure only.
    """
    exact = network.make_fp32_forward
    return network.forward if exact is None else exact()
