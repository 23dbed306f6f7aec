"""Operator that runs a module as it is, in place of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class OpaqueModule:
    """Operator that runs a module as it is, on bands with ``halo`` rows around them.

    Attributes:
        name: Path of the module.
        module: Module that takes one image and returns one.
        channels: Channels of its result.
        upscale: Result rows per input row.
        downscale: Input rows per result row; ``upscale`` or this is 1.
        halo: Most rows between a result row and an input row that it depends on.
        grain: Bands begin at multiples of this many input rows.
        workspace_per_element: Peak bytes per element of its input, result included.
        autocast: Autocast state of the trial run, restored in each run.
    """

    name: str
    module: nn.Module
    channels: int
    upscale: int
    downscale: int
    halo: int
    grain: int
    workspace_per_element: float
    autocast: AutocastState

    @property
    def __name__(self) -> str:
        """Operator name for messages and for rules."""
        return "block"

    def __call__(self, rows: Tensor) -> Tensor:
        """Run the module on these rows (B, C, H, W)."""
        if isinstance(rows, FakeTensor):
            # In a dry run its Python code has no values to work on, but its workspace is known.
            work = rows.new_empty(int(self.workspace_per_element * rows.numel()), dtype=torch.uint8)
            result = rows.new_empty(self.output_shape(rows.shape))
            del work
            return result
        # keep other threads from tracing it meanwhile
        with TRACE_LOCK, self.autocast.restore():
            return self.module(rows)

    def output_shape(self, input_shape: Sequence[int]) -> list[int]:
        """Return the result's shape for an input of shape ``input_shape``."""
        batch, _, *sides = input_shape
        return [batch, self.channels, *(side * self.upscale // self.downscale for side in sides)]

    def receptive_field(self, span: Span, size: int, width: int = 0) -> Span:
        """Return the input rows that result rows ``span`` depend on.

        ``size`` is the height of the input; its width does not matter.
        """
        first, last = (row * self.downscale // self.upscale for row in (span[0], span[1] - 1))
        low = (first - self.halo) // self.grain * self.grain
        high = -(-(last + self.downscale + self.halo) // self.grain) * self.grain
        return max(0, low), min(size, high)

    def run_band(self, rows: Tensor, span: Span, size: int) -> Tensor:
        """Return result rows ``span``, from the input rows of `receptive_field`."""
        low = self.receptive_field(span, size)[0] * self.upscale // self.downscale
        return self(rows).narrow(2, span[0] - low, span[1] - span[0])
