"""Maps as plain runs of bytes, row after row, so that any rows lie together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.streaming.pages.page import memory_order
from lowtide.streaming.spans import Span, Spans, count


class RowMajorLayout:
    """How rows of one map lie in a file or in a buffer, and how they lay in memory before."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
        self._dim, self._dtype = dim, dtype
        self._others = [side for place, side in enumerate(shape) if place != dim]
        self._row_bytes = torch.Size(self._others).numel() * dtype.itemsize
        self._order = list(range(len(shape)))
        self.nbytes = self._row_bytes * shape[dim]

    def place(self, span: Span) -> tuple[int, int]:
        """The bytes of a span: from, to before."""
        return span[0] * self._row_bytes, span[1] * self._row_bytes

    def bytes_of(self, spans: Spans) -> int:
        """How many bytes these rows are."""
        return count(spans) * self._row_bytes

    def run(self, rows: Tensor) -> Tensor:
        """The bytes of rows, which may lie in memory in any order."""
        if rows.shape[self._dim] > 1:  # of a single row it says nothing
            self._order = memory_order(rows)
        return rows.movedim(self._dim, 0).contiguous().flatten().view(torch.uint8)

    def rows(self, run: Tensor) -> Tensor:
        """The rows that a run of bytes holds, laid out as what was made a run last: or other
        kernels would be run on them."""
        plain = run.view(self._dtype).view(len(run) // self._row_bytes, *self._others)
        laid = plain.movedim(0, self._dim).permute(self._order).contiguous()
        return laid.permute([self._order.index(place) for place in range(laid.dim())])
