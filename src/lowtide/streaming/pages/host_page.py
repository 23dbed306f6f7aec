"""Maps of a card that are kept in the memory of its host between segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.streaming.pages.row_major import RowMajorLayout
from lowtide.streaming.pages.transfer import HostTransfer, PendingFetch, PendingStore
from lowtide.streaming.spans import Spans, common, count

# The bands whose rows are on the device: the present one and the next.
_AT_ONCE = 2


@dataclass(frozen=True)
class _Prefetched:
    """What one band reads, and the memory that it came to."""

    spans: Spans
    memory: Tensor
    coming: PendingFetch


class HostPage:
    """A map in the host's memory. Rows go there while the card computes, and those that the next
    band reads come back while it computes the present one, into memory that the last but one is
    done with."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, carrier: HostTransfer
    ) -> None:
        self.device, self._carrier = carrier.device, carrier
        self._form = RowMajorLayout(shape, dtype, dim)
        self._room = carrier.room(self._form.nbytes)
        self._leaving: PendingStore | None = None
        self._expected: list[Spans] = []
        self._ahead = deque[_Prefetched]()
        self._former: _Prefetched | None = None

    def write(self, first: int, rows: Tensor) -> None:
        """Begin to put rows from ``first`` on in their place, when the last ones are there."""
        run = self._form.run(rows)
        if self._leaving is not None:
            self._leaving.there()
        self._leaving = self._carrier.out(run, self._room, self._form.place((first, first))[0])

    def expect(self, spans: Spans) -> None:
        """Begin to fetch what a band reads; the first band's rows with those of the second, so that
        both have as much memory, which all that follow use again."""
        if not spans:
            self._let_go()
            return
        if len(self._ahead) == _AT_ONCE:
            self._former = self._ahead.popleft()
            self._former.coming.over()
        self._expected.append(spans)
        if len(self._ahead) + len(self._expected) == _AT_ONCE:
            self._begin()

    def read(self, spans: Spans) -> Tensor:
        """Rows: of those that were fetched ahead, or fetched now."""
        self._begin()
        for ahead in self._ahead:
            if count(common(ahead.spans, spans)) == count(spans):
                return _own(self._form.rows(self._cut(ahead, spans)), ahead.memory)
        return self._form.rows(self._fetch(spans, None, 0).coming.here())

    def _begin(self) -> None:
        """Fetch what is expected."""
        most = max(map(self._form.bytes_of, self._expected), default=0)
        for spans in self._expected:
            self._ahead.append(self._fetch(spans, self._former, most))
            self._former = None
        self._expected = []

    def _fetch(self, spans: Spans, former: _Prefetched | None, most: int) -> _Prefetched:
        """Into the memory of ``former`` if that is large enough, or some of ``most`` bytes."""
        size = self._form.bytes_of(spans)
        if former is None or len(former.memory) < size:
            former = None
            memory = torch.empty(max(size, most), dtype=torch.uint8, device=self.device)
        else:
            memory = former.memory
        places = [self._form.place(span) for span in spans]
        after = None if former is None else former.coming
        return _Prefetched(
            spans, memory, self._carrier.back(self._room, places, memory[:size], after)
        )

    def _cut(self, ahead: _Prefetched, spans: Spans) -> Tensor:
        """The bytes of ``spans``, of those that were fetched ahead."""
        run, parts, at = ahead.coming.here(), [], 0
        for span in ahead.spans:
            start = self._form.place(span)[0] - at
            for part in common([span], spans):
                first, last = self._form.place(part)
                parts.append(run[first - start : last - start])
            at += self._form.bytes_of([span])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def keep(self, spans: Spans) -> None:
        """The page goes as a whole."""

    def _let_go(self) -> None:
        """Of the memory on the device that rows come to."""
        for ahead in self._ahead:
            ahead.coming.over()
        self._ahead.clear()
        self._expected, self._former = [], None

    def close(self) -> None:
        """Give the memory to other pages."""
        self._let_go()
        if self._leaving is not None:
            self._leaving.there()
        self._leaving = None
        self._carrier.release(self._room)


def _own(rows: Tensor, memory: Tensor) -> Tensor:
    """Rows that stay as they are when other bytes come to ``memory``."""
    shared = rows.untyped_storage()._cdata == memory.untyped_storage()._cdata
    return rows.clone() if shared else rows
