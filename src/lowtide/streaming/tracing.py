"""What one run of a network holds, told without running it."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.memory.calibration import Calibration
from lowtide.memory.costs import TracedPoint
from lowtide.memory.estimate import Estimate, estimate
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.steps import InferenceStep
from lowtide.streaming.layout import round_up
from lowtide.streaming.step import Network

_SIDES = (64, 128, 256, 512, 1024, 2048)
_NO_MARGIN = Calibration(share=0.0, fixed_bytes=0, count=0, coverage=1.0)
# Rows of an estimate that are not the run's own: they have rows of their own in a plan.
_NOT_THE_RUN = ("weights", "allocator", "runtime", "context", "margin")


def trace_tile(
    network: Network, height: int, width: int, *, images: int = 1,
    device: str | DeviceProfile = "cpu",
) -> Estimate:  # fmt: skip
    """The estimate for ``images`` images of one size given to ``network`` at once.

    Its activations include the images as floats. Raises `ModelError` as `estimate` does.
    """
    assert isinstance(network.forward, nn.Module)
    layout = torch.channels_last if network.channels_last else torch.contiguous_format
    batch = torch.empty(
        images, network.in_channels, height, width, dtype=network.dtype, device="meta",
        memory_format=layout,
    )  # fmt: skip
    return estimate(
        network.forward, InferenceStep((batch,)), device=device, dtype=network.dtype,
        calibration=_NO_MARGIN,
    )  # fmt: skip


def run_bytes(network: Network, told: Estimate) -> int:
    """Bytes alive at the peak of a tile's run besides the weights, conversions included."""
    rows = {row.name: row.value for row in told.ledger}
    converted = network.channels_last or network.dtype != torch.float32
    # The images are kept as they came until their converted copy has been run.
    kept = rows.get("inputs", 0) * 4 // network.dtype.itemsize if converted else 0
    return kept + sum(count for name, count in rows.items() if name not in _NOT_THE_RUN)


def trace_points(network: Network, *, align: int, minimum: int) -> tuple[TracedPoint, ...]:
    """(pixels, bytes) for squares of growing size; empty for a network that cannot be traced."""
    if not isinstance(network.forward, nn.Module):
        return ()
    points: list[TracedPoint] = []
    for side in sorted({round_up(max(side, minimum), align) for side in _SIDES}):
        told = trace_tile(network, side, side)
        if told.method != "traced":
            return ()
        points.append(TracedPoint(pixels=side * side, peak_bytes=run_bytes(network, told)))
    return tuple(points)

