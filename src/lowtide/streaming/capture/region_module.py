"""Operator for a module that declares its own receptive field of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.attention.spatial.row_region import RowRegionModule
from lowtide.core.trace_cache import TRACING
from lowtide.memory.measurement.live_peak import live_peak_bytes
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.spans import Span

# Rows of the band whose workspace is measured, and its least number of grains: a window inside the
# image needs more rows than one at its border.
_TRIED_ROWS, _TRIED_GRAINS = 32, 2


@dataclass
class RegionModule:
    """Operator that runs a `RowRegionModule` on bands with the halo that it declares.

    Its workspace is measured on the CPU once for each image shape; ``work``, bytes by (C, H, W), is
    shared by equal modules.
    """

    name: str
    module: RowRegionModule
    autocast: AutocastState
    work: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """Operator name for messages and for rules."""
        return "block"

    def __call__(self, image: Tensor) -> Tensor:
        """Return the whole result for an image (B, C, H, W)."""
        return self.band(image, (0, image.shape[2]), image.shape[2])

    def shape(self, given: Sequence[int]) -> list[int]:
        """Return the result's shape for an input of shape ``given``."""
        return list(given)

    def grain(self, height: int, width: int) -> int:
        """Return the number of rows that are computed together."""
        return min(self.module.row_grain(height, width), height)

    def seen(self, span: Span, height: int, width: int) -> Span:
        """Return the input rows that result rows ``span`` depend on."""
        return self.module.rows_needed(*span, height, width)

    def band(self, rows: Tensor, span: Span, height: int) -> Tensor:
        """Return result rows ``span``, from the input rows of `seen`."""
        if isinstance(rows, FakeTensor):
            # In a dry run its weights are real, so its workspace comes from `work_bytes`.
            result = rows.new_empty((*rows.shape[:2], span[1] - span[0], rows.shape[3]))
            work = rows.new_empty(
                self.work_bytes(rows.shape[1], height, rows.shape[3]), dtype=torch.uint8
            )
            del work
            return result
        # keep other threads from tracing it meanwhile
        with TRACING, self.autocast.again():
            return self.module.forward_rows(rows, *span, height)

    def work_bytes(self, channels: int, height: int, width: int) -> int:
        """Return the workspace bytes for a band of such an image; 0 on a GPU."""
        weight, shape = next(self.module.parameters()), (channels, height, width)
        if weight.device.type != "cpu":
            return 0
        if shape not in self.work:
            grain = self.grain(height, width)
            rows = max(_TRIED_ROWS // grain, _TRIED_GRAINS) * grain
            first = grain if grain + rows <= height else 0
            span = first, min(first + rows, height)
            low, high = self.seen(span, height, width)
            image = torch.zeros(1, channels, high - low, width, dtype=weight.dtype)
            with torch.inference_mode():
                taken = live_peak_bytes(lambda: self.module.forward_rows(image, *span, height))
            result = channels * (span[1] - span[0]) * width * weight.dtype.itemsize
            self.work[shape] = max(0, taken - result)
        return self.work[shape]
