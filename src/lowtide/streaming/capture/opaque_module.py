"""A module that is run as it is, in place of a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.core.trace_cache import TRACING
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class OpaqueModule:
    """A module of one image that is run as it is, on bands with ``halo`` rows around them.

    A row of its result depends on rows of its input no further away than ``halo``; bands begin at
    multiples of ``grain`` rows of the input. Its result has ``times`` as many rows as its input,
    or one for ``apart`` of them. ``work_bytes`` is what it takes for each number of its input,
    its result included. It is run with ``autocast`` as that was when it was tried.
    """

    name: str
    module: nn.Module
    channels: int
    times: int
    apart: int
    halo: int
    grain: int
    work_bytes: float
    autocast: AutocastState

    @property
    def __name__(self) -> str:
        """For people, and the name by which rules know it."""
        return "block"

    def __call__(self, rows: Tensor) -> Tensor:
        """The module's result for these rows."""
        if isinstance(rows, FakeTensor):
            # What its Python does with values cannot be followed; what it takes is known.
            work = rows.new_empty(int(self.work_bytes * rows.numel()), dtype=torch.uint8)
            result = rows.new_empty(self.shape(rows.shape))
            del work
            return result
        # No other thread may trace it meanwhile.
        with TRACING, self.autocast.again():
            return self.module(rows)

    def shape(self, given: Sequence[int]) -> list[int]:
        """Of the result, for an input of this shape."""
        batch, _, *sides = given
        return [batch, self.channels, *(side * self.times // self.apart for side in sides)]

    def seen(self, span: Span, size: int, width: int = 0) -> Span:
        """Rows of an input ``size`` high, of any width, that rows of the result are made of."""
        first, last = (row * self.apart // self.times for row in (span[0], span[1] - 1))
        low = (first - self.halo) // self.grain * self.grain
        high = -(-(last + self.apart + self.halo) // self.grain) * self.grain
        return max(0, low), min(size, high)

    def band(self, rows: Tensor, span: Span, size: int) -> Tensor:
        """Rows of the result, of the rows that are `seen`."""
        low = self.seen(span, size)[0] * self.times // self.apart
        return self(rows).narrow(2, span[0] - low, span[1] - span[0])
