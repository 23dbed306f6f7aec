"""Operator that runs a module as it is, in place of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

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
        module: Module that takes one tensor and returns one of as many dims.
        axis: Dim of the rows in both.
        sizes: By dim of the result its size, or as a `Fraction` that of the input's dim per
            place; for the rows, numerator or denominator is 1.
        halo: Most rows between a result row and an input row that it depends on.
        grain: Bands begin at multiples of this many input rows.
        workspace_per_element: Peak bytes per element of its input, result included.
        autocast: Autocast state of the trial run, restored in each run.
    """

    name: str
    module: nn.Module
    axis: int
    sizes: tuple[int | Fraction, ...]
    halo: int
    grain: int
    workspace_per_element: float
    autocast: AutocastState

    @property
    def __name__(self) -> str:
        """Operator name for messages and for rules."""
        return "block"

    def __call__(self, rows: Tensor) -> Tensor:
        """Run the module on these rows, (B, C, H, W) for an image."""
        if isinstance(rows, FakeTensor):
            # In a dry run its Python code has no values to work on, but its workspace is known.
            work = rows.new_empty(int(self.workspace_per_element * rows.numel()), dtype=torch.uint8)
            result = rows.new_empty(self.output_shape(rows.shape))
            del work
            return result
        # keep other threads from tracing it meanwhile
        with TRACE_LOCK, self.autocast.restore():
            return self.module(rows)

    @property
    def scale(self) -> Fraction:
        """Result rows per input row."""
        return Fraction(self.sizes[self.axis])

    def output_shape(self, input_shape: Sequence[int]) -> list[int]:
        """Return the result's shape for an input of shape ``input_shape``."""
        return [
            int(given * size) if isinstance(size, Fraction) else size
            for given, size in zip(input_shape, self.sizes, strict=True)
        ]

    def receptive_field(self, span: Span, size: int) -> Span:
        """Return the input rows, of ``size``, that result rows ``span`` depend on."""
        first, last = (int(row / self.scale) for row in (span[0], span[1] - 1))
        low = (first - self.halo) // self.grain * self.grain
        below = last + self.scale.denominator + self.halo
        return max(0, low), min(size, -(-below // self.grain) * self.grain)

    def run_band(self, rows: Tensor, span: Span, size: int) -> Tensor:
        """Return result rows ``span``, from the input rows of `receptive_field`."""
        low = int(self.receptive_field(span, size)[0] * self.scale)
        return self(rows).narrow(self.axis, span[0] - low, span[1] - span[0])
