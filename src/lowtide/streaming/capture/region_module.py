"""A module that tells its rows itself, in place of a graph of its own."""

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

# Rows of a band at which it is measured what a module takes beside them, and what is made together
# of them at least: a window within the image sees more than one at its border.
_TRIED_ROWS, _TRIED_GRAINS = 32, 2


@dataclass
class RegionModule:
    """A `RowRegionModule` module, run on bands with the rows around them that it names.

    What it takes beside its rows and their result is measured, once for each shape of image;
    ``work`` is shared by modules of a kind.
    """

    name: str
    module: RowRegionModule
    autocast: AutocastState
    work: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """For people, and the name by which rules know it."""
        return "block"

    def __call__(self, image: Tensor) -> Tensor:
        """The result as a whole."""
        return self.band(image, (0, image.shape[2]), image.shape[2])

    def shape(self, given: Sequence[int]) -> list[int]:
        """Of the result, for an input of this shape."""
        return list(given)

    def grain(self, height: int, width: int) -> int:
        """Rows that are made together."""
        return min(self.module.row_grain(height, width), height)

    def seen(self, span: Span, height: int, width: int) -> Span:
        """Rows of the input that rows of the result are made of."""
        return self.module.rows_needed(*span, height, width)

    def band(self, rows: Tensor, span: Span, height: int) -> Tensor:
        """Rows of the result, of the rows that are `seen`."""
        if isinstance(rows, FakeTensor):
            # Its weights are real: what it takes is known from elsewhere.
            result = rows.new_empty((*rows.shape[:2], span[1] - span[0], rows.shape[3]))
            work = rows.new_empty(
                self.work_bytes(rows.shape[1], height, rows.shape[3]), dtype=torch.uint8
            )
            del work
            return result
        # No other thread may trace it meanwhile.
        with TRACING, self.autocast.again():
            return self.module.forward_rows(rows, *span, height)

    def work_bytes(self, channels: int, height: int, width: int) -> int:
        """What the module takes beside some rows of such an image and their result."""
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
