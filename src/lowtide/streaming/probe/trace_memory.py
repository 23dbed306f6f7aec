"""Memory of a network's run, predicted by a trace on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from lowtide.memory.costs import BLOCK_SIZES, ReusedBlockBytes, TracedPoint
from lowtide.memory.plan import LedgerRow
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.prediction.calibration import NO_MARGIN
from lowtide.memory.prediction.cpu import CpuWorkspaceMeter, predict_cpu
from lowtide.memory.prediction.estimate import Estimate, estimate, trace_step
from lowtide.memory.prediction.operator_costs import multiply_adds
from lowtide.memory.prediction.result import live_tensor_rows
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.fake import FakeModelConverter
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.memory.tracing.trace import MemoryTrace
from lowtide.streaming.tiles.grid import round_up
from lowtide.streaming.tiles.network import RunnableNetwork

_SIDES = (64, 128, 256, 512, 1024, 2048)
_WORKSPACE_LIMIT_BYTES = 512 << 20
_LARGEST_MULTIPLE = 128
# Larger sizes run more operators, and take minutes, where a network works through its windows or
# rows in chunks of one size: memory then grows with the pixels alone.
_MANY_OPERATORS, _MANY_MORE = 10_000, 5_000
# Rows of an estimate that a plan has separate rows for.
_NOT_THE_RUN = ("weights", "allocator", "runtime", "context", "margin")


def import_tracing_libraries() -> None:
    """Import the many libraries of a trace, by tracing a tiny module."""
    images = torch.empty(1, 1, 2, 2, device="meta")
    trace_step(nn.Conv2d(1, 1, 1), InferenceStep((images,)))


class TileTracer:
    """Traces of one network's runs on the CPU, which share its fake weights."""

    def __init__(self, network: RunnableNetwork) -> None:
        assert isinstance(network.forward, nn.Module)
        self._network, self._module = network, network.forward
        self._twins = FakeModelConverter(keeps_weights=True)
        self._live_bytes: dict[tuple[int, int], int] = {}

    def trace(self, height: int, width: int) -> MemoryTrace:
        """Return the trace of a run on one image."""
        step = _step(self._network, 1, height, width)
        trace = trace_step(self._module, step, twins=self._twins)
        rows = live_tensor_rows(trace, None)
        self._live_bytes[height, width] = sum(live_bytes_rows(self._network, rows))
        return trace

    def live_bytes(self, height: int, width: int) -> int:
        """Return the live bytes at the peak of a run on one image, without operators' workspace."""
        if (height, width) not in self._live_bytes:
            self.trace(height, width)
        return self._live_bytes[height, width]


def predict_tile_memory(
    network: RunnableNetwork,
    height: int,
    width: int,
    *,
    images: int = 1,
    device: str | DeviceProfile = "cpu",
) -> Estimate:
    """Predict the memory of ``images`` images of one size in one batch of ``network``.

    Activations include the images in float32. Raises `ModelError` as `estimate` does.
    """
    assert isinstance(network.forward, nn.Module)
    step = _step(network, images, height, width)
    # The planner adds what the heap keeps itself.
    return estimate(network.forward, step, device=device, calibration=NO_MARGIN, heap="trim")


def _step(network: RunnableNetwork, count: int, height: int, width: int) -> InferenceStep:
    images = torch.empty(
        count,
        network.in_channels,
        height,
        width,
        device="meta",
        memory_format=network.memory_format,
    )
    return InferenceStep((images,))


def live_bytes_rows(network: RunnableNetwork, ledger: Iterable[LedgerRow]) -> Iterator[int]:
    """Yield the parts of a tile's live bytes at the peak, without the weights.

    The images count twice where they are copied to another memory format.
    """
    for row in ledger:
        if row.name not in _NOT_THE_RUN:
            yield row.value
        if row.name == "inputs" and network.channels_last:
            # The original images stay alive until their copy has been run.
            yield row.value


def trace_points(
    network: RunnableNetwork,
    *,
    align: int,
    minimum: int,
    limit_bytes: int | None = None,
    size: tuple[int, int] | None = None,
    up_to: int | None = None,
    traces: TileTracer | None = None,
) -> tuple[TracedPoint, ...]:
    """Return traced (pixels, bytes) for squares of growing size, or up to one ``size``.

    Empty for a network that cannot be traced; ends before sizes that run many operators. The
    workspace of operators is measured where a run stays within ``limit_bytes`` (and 512 MiB), and
    grows with the pixels from there on.

    Args:
        size: (H, W) of the one run that has to be known, which is then the largest that is traced.
        up_to: Pixels of the largest run that has to be known; the first square of as many is the
            last that is traced.
        traces: Traces of the network to go on with.
    """
    if not isinstance(network.forward, nn.Module):
        return ()
    traces = traces or TileTracer(network)
    limit = (
        _WORKSPACE_LIMIT_BYTES if limit_bytes is None else min(limit_bytes, _WORKSPACE_LIMIT_BYTES)
    )
    workspace = CpuWorkspaceMeter(JsonCacheTable("operators", *machine_facts()), limit_bytes=limit)
    points: list[TracedPoint] = []
    per_pixel, before = 0.0, math.inf
    for height, width in _sizes(align, minimum, size):
        if up_to is not None and len(points) > 1 and points[-1].pixels >= up_to:
            break
        pixels = height * width
        try:
            trace = traces.trace(height, width)
        except Exception:  # noqa: BLE001 - whatever stops a trace, probes measure real runs
            return ()
        live = traces.live_bytes(height, width)
        if trace.peak_bytes <= limit or not points:
            prediction = predict_cpu(trace, workspace, NO_MARGIN)
            per_pixel = max(0, sum(live_bytes_rows(network, prediction.rows)) - live) / pixels
        peak = live + math.ceil(per_pixel * pixels)
        points.append(
            TracedPoint(
                pixels=pixels,
                peak_bytes=peak,
                reused_blocks=_reused(trace),
                multiply_adds=multiply_adds(trace),
            )
        )
        more = 4 * (len(trace.ops) - before)  # what the next size adds, if it grows by the pixels
        if len(trace.ops) > _MANY_OPERATORS or more > _MANY_MORE:
            break
        before = len(trace.ops)
    workspace.store.save()
    return tuple(points)


def _sizes(align: int, minimum: int, size: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return (H, W) to trace, by their pixels: ``size`` and a small one, or all squares."""
    squares = [
        (side, side) for side in sorted({round_up(max(side, minimum), align) for side in _SIDES})
    ]
    if size is None:
        return squares
    pixels = size[0] * size[1]
    # Two sizes show how memory grows.
    other = next(one for one in squares if one[0] * one[1] != pixels)
    return sorted((other, size), key=math.prod)


def _reused(trace: MemoryTrace) -> tuple[ReusedBlockBytes, ...]:
    sizes = np.array([0, *(event.size for event in trace.events)], np.int64)
    peak = int(sizes.cumsum().argmax())
    found = []
    for below in BLOCK_SIZES:
        alive = np.where(abs(sizes) < below, sizes, 0).cumsum()
        found.append(
            ReusedBlockBytes(
                at_run_peak=max(0, int(alive[peak])), max_live=max(0, int(alive.max()))
            )
        )
    return tuple(found)


def padding_multiple(
    network: RunnableNetwork, *, align: int, traces: TileTracer | None = None
) -> int:
    """Return the multiple to which the network pads its input sides, from its memory.

    Powers of two times ``align`` up to 128 are tried: a side just above one multiple takes as much
    memory as the next multiple. Returns ``align`` where nothing is padded, or where nothing can be
    traced. ``traces`` are those of the network to go on with.
    """
    if not isinstance(network.forward, nn.Module):
        return align
    multiples = [align << power for power in range(1, 8) if align << power <= _LARGEST_MULTIPLE]
    base = max(multiples, default=align)
    traces = traces or TileTracer(network)

    def live(side: int) -> int:
        return traces.live_bytes(side, side)

    try:
        least, beyond = live(base), live(base + align)
        for found, multiple in pairwise([align, *multiples]):
            # If it is a multiple, one step above takes as much as the whole next multiple.
            if beyond - least <= (live(base + multiple) - least) * 3 // 4:
                return found
    except Exception:  # noqa: BLE001 - whatever stops a trace, nothing is known then
        return align
    return base
