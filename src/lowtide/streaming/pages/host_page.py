"""Pages of a GPU that are spilled to pinned host memory between segments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.streaming.pages.row_major import RowMajorLayout
from lowtide.streaming.pages.transfer import HostTransfer, PendingFetch, PendingStore
from lowtide.streaming.spans import Spans, common, count

# Bands whose rows are on the device: the current one and the next.
_AT_ONCE = 2


@dataclass(frozen=True)
class _Prefetched:
    """The rows that one band reads, their device memory, and the pending copy."""

    spans: Spans
    memory: Tensor
    coming: PendingFetch


class HostPage:
    """A feature map in host memory, copied asynchronously to and from the GPU.

    Rows are copied out while the GPU computes. Those that the next band reads are prefetched during
    the current one, into the device memory of the band before it.
    """

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
        """Start the copy of rows to the host, once the previous rows are there."""
        run = self._form.run(rows)
        if self._leaving is not None:
            self._leaving.there()
        self._leaving = self._carrier.out(run, self._room, self._form.place((first, first))[0])

    def expect(self, spans: Spans) -> None:
        """Start the prefetch of the rows that a band reads.

        The first band's rows are fetched together with those of the second, so that both get
        buffers of equal size, which all later bands reuse.
        """
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
        """Return rows from the prefetched ones, or fetch them now."""
        self._begin()
        for ahead in self._ahead:
            if count(common(ahead.spans, spans)) == count(spans):
                return _own(self._form.rows(self._cut(ahead, spans)), ahead.memory)
        return self._form.rows(self._fetch(spans, None, 0).coming.here())

    def _begin(self) -> None:
        """Fetch the expected rows."""
        most = max(map(self._form.bytes_of, self._expected), default=0)
        for spans in self._expected:
            self._ahead.append(self._fetch(spans, self._former, most))
            self._former = None
        self._expected = []

    def _fetch(self, spans: Spans, former: _Prefetched | None, most: int) -> _Prefetched:
        """Fetch rows into the memory of ``former`` if large enough, else into new memory.

        New memory has at least ``most`` bytes.
        """
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
        """Return the bytes of ``spans`` out of those that were prefetched."""
        run, parts, at = ahead.coming.here(), [], 0
        for span in ahead.spans:
            start = self._form.place(span)[0] - at
            for part in common([span], spans):
                first, last = self._form.place(part)
                parts.append(run[first - start : last - start])
            at += self._form.bytes_of([span])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def keep(self, spans: Spans) -> None:
        """Do nothing: the page is freed as a whole."""

    def _let_go(self) -> None:
        """Free the prefetch buffers on the device."""
        for ahead in self._ahead:
            ahead.coming.over()
        self._ahead.clear()
        self._expected, self._former = [], None

    def close(self) -> None:
        """Release the host memory to other pages."""
        self._let_go()
        if self._leaving is not None:
            self._leaving.there()
        self._leaving = None
        self._carrier.release(self._room)


def _own(rows: Tensor, memory: Tensor) -> Tensor:
    """Return rows that stay valid when ``memory`` is overwritten."""
    shared = rows.untyped_storage()._cdata == memory.untyped_storage()._cdata
    return rows.clone() if shared else rows
