"""Operators that run a module as it is, in place of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.attention.spatial.local_window import RowRegionModule
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.spans import Span

# Rows of the band whose workspace is measured, and its least number of grains: a window inside the
# image needs more rows than one at its border.
_TRIED_ROWS, _TRIED_GRAINS = 32, 2


@dataclass(frozen=True)
class OpaqueModuleOp:
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


@dataclass
class RowRegionOp:
    """Operator that runs a `RowRegionModule` on bands with the halo that it declares.

    Its workspace is measured on the CPU once for each image shape; ``workspace_cache``, bytes by
    (C, H, W), is shared by equal modules.
    """

    name: str
    module: RowRegionModule
    autocast: AutocastState
    workspace_cache: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """Operator name for messages and for rules."""
        return "block"

    def __call__(self, image: Tensor) -> Tensor:
        """Return the whole result for an image (B, C, H, W)."""
        return self.run_band(image, (0, image.shape[2]), image.shape[2])

    def output_shape(self, input_shape: Sequence[int]) -> list[int]:
        """Return the result's shape for an input of shape ``input_shape``."""
        return list(input_shape)

    def grain(self, height: int, width: int) -> int:
        """Return the number of rows that are computed together."""
        return min(self.module.row_multiple(height, width), height)

    def receptive_field(self, span: Span, height: int, width: int) -> Span:
        """Return the input rows that result rows ``span`` depend on."""
        return self.module.rows_needed(*span, height, width)

    def run_band(self, rows: Tensor, span: Span, height: int) -> Tensor:
        """Return result rows ``span``, (B, C, rows, W), from those of `receptive_field`.

        ``rows`` is (B, C, input rows, W) of an image of ``height`` rows.
        """
        if isinstance(rows, FakeTensor):
            # In a dry run its weights are real, so what `workspace_bytes` says counts.
            result = rows.new_empty((*rows.shape[:2], span[1] - span[0], rows.shape[3]))
            work = rows.new_empty(
                self.workspace_bytes(rows.shape[1], height, rows.shape[3]), dtype=torch.uint8
            )
            del work
            return result
        # keep other threads from tracing it meanwhile
        with TRACE_LOCK, self.autocast.restore():
            return self.module.forward_rows(rows, *span, height)

    def workspace_bytes(self, channels: int, height: int, width: int) -> int:
        """Return the workspace bytes for a band of such an image; 0 on a GPU."""
        weight, shape = next(self.module.parameters()), (channels, height, width)
        if weight.device.type != "cpu":
            return 0
        if shape not in self.workspace_cache:
            grain = self.grain(height, width)
            rows = max(_TRIED_ROWS // grain, _TRIED_GRAINS) * grain
            first = grain if grain + rows <= height else 0
            span = first, min(first + rows, height)
            low, high = self.receptive_field(span, height, width)
            image = torch.zeros(1, channels, high - low, width, dtype=weight.dtype)
            with torch.inference_mode():
                taken = live_peak_bytes(lambda: self.module.forward_rows(image, *span, height))
            result = channels * (span[1] - span[0]) * width * weight.dtype.itemsize
            self.workspace_cache[shape] = max(0, taken - result)
        return self.workspace_cache[shape]
