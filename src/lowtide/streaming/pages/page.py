"""Interface of pages, pages in device memory, and the byte layout of pages elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.spans import Span, Spans, count_rows, intersect_spans


class FeaturePage(ABC):
    """A feature map kept between segments, written and read by rows.

    The rows may be along any dim; those of images are (B, C, rows, W). Rows are read to ``device``.
    """

    device: torch.device

    @abstractmethod
    def write(self, first: int, rows: Tensor) -> None:
        """Write rows, (B, C, rows, W) for images, from row ``first`` on."""

    @abstractmethod
    def read(self, spans: Spans) -> Tensor:
        """Return the rows of these spans concatenated, (B, C, rows, W) for images.

        They must not be modified.
        """

    def prefetch(self, spans: Spans) -> None:  # noqa: B027 - for pages that have something to do
        """Announce the rows that the next band reads, for prefetch.

        Follows the calls for earlier bands; the rows may be fetched while the band before is
        computed. No rows: no band reads any for now.
        """

    def retain(self, spans: Spans) -> None:  # noqa: B027
        """Announce that only these rows will be read from now on."""

    def close(self) -> None:  # noqa: B027
        """Free the memory or disk space of the page; may be called more than once."""


class MemoryPage(FeaturePage):
    """A feature map in memory.

    Written tensors are kept without a copy, unless they are a small part of a larger storage.
    Pieces that are not needed any longer are freed one by one.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self._dim, self.device = dim, device
        self._pieces: list[tuple[Span, Tensor]] = []

    @classmethod
    def from_tensor(cls, rows: Tensor, dim: int) -> MemoryPage:
        """Create a page from a whole feature map, such as (B, C, H, W)."""
        page = cls(dim, rows.device)
        page.write(0, rows)
        return page

    def write(self, first: int, rows: Tensor) -> None:
        """Keep rows, such as (B, C, rows, W), from row ``first`` on.

        Small views of large storages are copied.
        """
        self.write_without_copy(first, clone_if_small(rows))

    def write_without_copy(self, first: int, rows: Tensor) -> None:
        """Keep rows, such as (B, C, rows, W), without a copy.

        As `write`, for rows that are soon read.
        """
        span = first, first + rows.shape[self._dim]
        in_order = not self._pieces or self._pieces[-1][0] < span
        self._pieces.append((span, rows))
        if not in_order:
            self._pieces.sort(key=lambda piece: piece[0])

    def read(self, spans: Spans) -> Tensor:
        """Return rows, such as (B, C, rows, W); a view where they are in one piece."""
        if len(spans) == 1:
            for piece, rows in self._pieces:
                if piece == spans[0]:
                    return rows
        found = []
        for span in spans:
            for (first, last), rows in self._pieces:
                low, high = max(first, span[0]), min(last, span[1])
                if low < high:
                    found.append(rows.narrow(self._dim, low - first, high - low))
        if sum(piece.shape[self._dim] for piece in found) != count_rows(spans):
            raise AssertionError(f"rows {spans} were not all written")
        return concat_rows(found, self._dim)

    def read_and_merge(self, spans: Spans) -> Tensor:
        """Return rows as `read` does, such as (B, C, rows, W).

        Concatenated rows are kept for the next operator.
        """
        rows = self.read(spans)
        if len(spans) == 1 and len(self._pieces) > 1:
            low, high = spans[0]
            rest = [one for one in self._pieces if one[0][1] <= low or one[0][0] >= high]
            inside = [one for one in self._pieces if low <= one[0][0] and one[0][1] <= high]
            if len(inside) > 1 and len(rest) + len(inside) == len(self._pieces):
                self._pieces = sorted([*rest, (spans[0], rows)], key=lambda piece: piece[0])
        return rows

    def retain(self, spans: Spans) -> None:
        """Free whole pieces that nothing will read."""
        self._pieces = [piece for piece in self._pieces if intersect_spans([piece[0]], spans)]

    def close(self) -> None:
        """Free all pieces."""
        self._pieces = []

    def trim(self, spans: Spans) -> None:
        """Free every row that nothing will read, copying the rest out of its piece."""
        if not spans:
            self._pieces = []
            return
        left: list[tuple[Span, Tensor]] = []
        for (first, last), rows in self._pieces:
            for low, high in intersect_spans([(first, last)], spans):
                part = rows.narrow(self._dim, low - first, high - low)
                left.append(((low, high), clone_if_small(part)))
        self._pieces = left


def input_pages(inputs: ModelInputs) -> list[FeaturePage]:
    """Return pages of the streamed tensors of a call."""
    pairs = zip(inputs.streamed, inputs.axes.values(), strict=True)
    return [MemoryPage.from_tensor(tensor, dim) for tensor, dim in pairs]


def concat_rows(pieces: Sequence[Tensor], dim: int, like: Tensor | None = None) -> Tensor:
    """Concatenate pieces along ``dim``, in the memory format of ``like``.

    Pieces, such as (B, C, rows, W), differ only in their rows. By default in the memory format of
    the first piece. It decides which kernels run on the result, and so its rounding.
    """
    if len(pieces) == 1:
        return pieces[0]
    order = memory_order(pieces[0] if like is None else like)
    place = order.index(dim)
    permuted = [piece.permute(order) for piece in pieces]
    # For non-contiguous pieces, PyTorch's own kernel on a GPU takes three times as long as one copy
    # each.
    own = permuted[0].device.type == "cpu" or all(piece.is_contiguous() for piece in permuted)
    return _permute_back(
        torch.cat(permuted, place) if own else concat_by_copy(permuted, place), order
    )


def concat_by_copy(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate pieces, such as (B, C, rows, W), as `torch.cat` does.

    By one copy of each piece.
    """
    sizes = [piece.shape[dim] for piece in pieces]
    shape = list(pieces[0].shape)
    shape[dim] = sum(sizes)
    whole, at = pieces[0].new_empty(shape), 0
    for piece, size in zip(pieces, sizes, strict=True):
        whole.narrow(dim, at, size).copy_(piece)
        at += size
    return whole


def _permute_back(permuted: Tensor, order: Sequence[int]) -> Tensor:
    """Return the view whose dims, permuted by ``order``, are those of ``permuted``."""
    return permuted.permute([order.index(one) for one in range(permuted.dim())])


def memory_order(rows: Tensor) -> list[int]:
    """Return the dims of a tensor of any shape sorted by stride, the largest first.

    A dim of size 1 comes after another with the same stride: PyTorch detects contiguous and
    channels-last by the stride of a batch of one too.
    """
    strides, shape = rows.stride(), rows.shape
    return sorted(range(rows.dim()), key=lambda place: (-strides[place], shape[place] == 1))


def clone_if_small(rows: Tensor) -> Tensor:
    """Return rows of any shape, cloned if their storage is over twice their size."""
    own = rows.numel() * rows.itemsize
    return rows if rows.untyped_storage().nbytes() <= 2 * own else rows.clone()


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
        return count_rows(spans) * self._row_bytes

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
