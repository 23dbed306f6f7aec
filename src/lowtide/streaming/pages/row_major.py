"""Row-major byte layout of feature maps, in which any rows are contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.streaming.pages.page import memory_order
from lowtide.streaming.spans import Span, Spans, count


class RowMajorLayout:
    """Byte offsets of a feature map's rows in a file or buffer, and its memory format."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
        self._dim, self._dtype = dim, dtype
        self._other_sizes = [side for place, side in enumerate(shape) if place != dim]
        self._row_bytes = torch.Size(self._other_sizes).numel() * dtype.itemsize
        self._order = list(range(len(shape)))
        self.nbytes = self._row_bytes * shape[dim]

    def byte_range(self, span: Span) -> tuple[int, int]:
        """Return the byte range of a span: (first, past the last)."""
        return span[0] * self._row_bytes, span[1] * self._row_bytes

    def bytes_of(self, spans: Spans) -> int:
        """Return the number of bytes of these rows."""
        return count(spans) * self._row_bytes

    def to_bytes(self, rows: Tensor) -> Tensor:
        """Return the bytes of rows in row-major order, uint8 (bytes,).

        Rows, such as (B, C, rows, W), may be in any memory format.
        """
        if rows.shape[self._dim] > 1:  # the strides of a single row say nothing
            self._order = memory_order(rows)
        return rows.movedim(self._dim, 0).contiguous().flatten().view(torch.uint8)

    def from_bytes(self, raw: Tensor) -> Tensor:
        """Return the rows held by ``raw``, uint8 (bytes,), such as (B, C, rows, W).

        In the memory format that `to_bytes` last saw: another one would select other kernels.
        """
        plain = raw.view(self._dtype).view(len(raw) // self._row_bytes, *self._other_sizes)
        permuted = plain.movedim(0, self._dim).permute(self._order).contiguous()
        return permuted.permute([self._order.index(place) for place in range(permuted.dim())])
