"""Maps that are kept between segments, in pieces as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lowtide.streaming.spans import Span, Spans, common, count


class Page(Protocol):
    """A map that is written and read by rows, which come to ``device``."""

    device: torch.device

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        ...

    def read(self, spans: Spans) -> Tensor:
        """Rows of these spans, one after another; not to be changed."""
        ...

    def expect(self, spans: Spans) -> None:
        """A band reads these rows, after those that were told of before: they may be fetched while
        the one before it is computed. No rows: for now no band reads any."""
        ...

    def keep(self, spans: Spans) -> None:
        """Only these rows will be read from now on."""
        ...

    def close(self) -> None:
        """Give back what it takes."""
        ...


class MemoryPage:
    """A map in memory.

    What is written is kept without a copy, unless it is a small part of something larger; what
    is not needed any longer goes piece by piece.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self._dim, self.device = dim, device
        self._pieces: list[tuple[Span, Tensor]] = []

    @classmethod
    def of(cls, rows: Tensor, dim: int) -> MemoryPage:
        """A whole map that is there already."""
        page = cls(dim, rows.device)
        page.write(0, rows)
        return page

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        self.put(first, compact(rows))

    def put(self, first: int, rows: Tensor) -> None:
        """`write` of rows that are soon read: they stay as they are."""
        span = first, first + rows.shape[self._dim]
        in_order = not self._pieces or self._pieces[-1][0] < span
        self._pieces.append((span, rows))
        if not in_order:
            self._pieces.sort(key=lambda piece: piece[0])

    def read(self, spans: Spans) -> Tensor:
        """Rows; a view where they lie in one piece."""
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
        if sum(piece.shape[self._dim] for piece in found) != count(spans):
            raise AssertionError(f"rows {spans} are not all there")
        return concat_rows(found, self._dim)

    def gather(self, spans: Spans) -> Tensor:
        """`read`, after which rows that were put together stay so for the next operator."""
        rows = self.read(spans)
        if len(spans) == 1 and len(self._pieces) > 1:
            low, high = spans[0]
            rest = [one for one in self._pieces if one[0][1] <= low or one[0][0] >= high]
            inside = [one for one in self._pieces if low <= one[0][0] and one[0][1] <= high]
            if len(inside) > 1 and len(rest) + len(inside) == len(self._pieces):
                self._pieces = sorted([*rest, (spans[0], rows)], key=lambda piece: piece[0])
        return rows

    def extended(self, span: Span) -> Tensor | None:
        """Rows of a span, to be written, in one piece with those before it; None if these are not
        one piece."""
        first, last = span
        if len(self._pieces) != 1 or self._pieces[0][0][1] != first:
            return None
        (((low, _), rows),) = self._pieces
        order, shape = memory_order(rows), list(rows.shape)
        shape[self._dim] = last - low
        laid = rows.new_empty([shape[one] for one in order])
        whole = _in_order(laid, order)
        whole.narrow(self._dim, 0, first - low).copy_(rows)
        self._pieces = [((low, last), whole)]
        return whole.narrow(self._dim, first - low, last - first)

    def expect(self, spans: Spans) -> None:
        """They are there."""

    def keep(self, spans: Spans) -> None:
        """Let go of whole pieces that nothing will read."""
        self._pieces = [piece for piece in self._pieces if common([piece[0]], spans)]

    def close(self) -> None:
        """Let go of everything."""
        self._pieces = []

    def trim(self, spans: Spans) -> None:
        """Let go of every row that nothing will read; the rest of a piece is copied out of it."""
        if not spans:
            self._pieces = []
            return
        left: list[tuple[Span, Tensor]] = []
        for (first, last), rows in self._pieces:
            for low, high in common([(first, last)], spans):
                part = rows.narrow(self._dim, low - first, high - low)
                left.append(((low, high), compact(part)))
        self._pieces = left


def concat_rows(pieces: Sequence[Tensor], dim: int, like: Tensor | None = None) -> Tensor:
    """The pieces one after another along ``dim``, in memory in the order in which ``like`` lies, or
    the first: on it depends which kernels are run, and so how they round."""
    if len(pieces) == 1:
        return pieces[0]
    order = memory_order(pieces[0] if like is None else like)
    place = order.index(dim)
    laid = [piece.permute(order) for piece in pieces]
    # Of parts of others PyTorch's own kernel on a card takes three times as long as copies of each.
    own = laid[0].device.type == "cpu" or all(piece.is_contiguous() for piece in laid)
    return _in_order(torch.cat(laid, place) if own else concat_by_copy(laid, place), order)


def concat_by_copy(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """What `torch.cat` makes of the pieces, by a copy of each."""
    sizes = [piece.shape[dim] for piece in pieces]
    shape = list(pieces[0].shape)
    shape[dim] = sum(sizes)
    whole, at = pieces[0].new_empty(shape), 0
    for piece, size in zip(pieces, sizes, strict=True):
        whole.narrow(dim, at, size).copy_(piece)
        at += size
    return whole


def _in_order(laid: Tensor, order: Sequence[int]) -> Tensor:
    """The view whose dimensions, taken in this order, are those of ``laid``."""
    return laid.permute([order.index(one) for one in range(laid.dim())])


def memory_order(rows: Tensor) -> list[int]:
    """The dimensions by their strides, the largest first.

    One of a single place comes after another with the same stride: PyTorch takes maps for
    contiguous or for channels last by the stride of a batch of one too.
    """
    strides, shape = rows.stride(), rows.shape
    return sorted(range(rows.dim()), key=lambda place: (-strides[place], shape[place] == 1))


def compact(rows: Tensor) -> Tensor:
    """``rows``, copied if they keep more than twice their own memory alive."""
    own = rows.numel() * rows.itemsize
    return rows if rows.untyped_storage().nbytes() <= 2 * own else rows.clone()
