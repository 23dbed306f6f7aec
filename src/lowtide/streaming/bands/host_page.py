"""Maps of a card that are kept in the memory of its host between segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.streaming.bands.carrier import Carrier, Coming, Leaving
from lowtide.streaming.bands.rowwise import Rowwise
from lowtide.streaming.bands.spans import Spans, common, count


class HostPage:
    """A map in the host's memory. Rows go there while the card computes, and those that the next
    band reads come back while it computes the present one."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, carrier: Carrier
    ) -> None:
        self.device, self._carrier = carrier.device, carrier
        self._form = Rowwise(shape, dtype, dim)
        self._room = carrier.room(self._form.nbytes)
        self._leaving: Leaving | None = None
        # What the next band reads, and what the kernels of the present one still may.
        self._ahead: tuple[Spans, Coming] | None = None
        self._former: Coming | None = None

    def write(self, first: int, rows: Tensor) -> None:
        """Begin to put rows from ``first`` on in their place, when the last ones are there."""
        run = self._form.run(rows)
        if self._leaving is not None:
            self._leaving.wait()
        self._leaving = self._carrier.out(run, self._room, self._form.place((first, first))[0])

    def expect(self, spans: Spans) -> None:
        """Begin to fetch what the next band reads, when all but the present one are done."""
        if self._former is not None:
            self._former.wait()
        self._former = None
        if self._ahead is not None:
            self._former = self._ahead[1]
            self._former.read()
        self._ahead = (spans, self._fetch(spans)) if spans else None

    def read(self, spans: Spans) -> Tensor:
        """Rows: of those that were fetched ahead, or fetched now."""
        if self._ahead is not None and count(common(self._ahead[0], spans)) == count(spans):
            return self._form.rows(self._cut(*self._ahead, spans))
        return self._form.rows(self._fetch(spans).here())

    def _fetch(self, spans: Spans) -> Coming:
        return self._carrier.back(self._room, [self._form.place(span) for span in spans])

    def _cut(self, ahead: Spans, coming: Coming, spans: Spans) -> Tensor:
        """The bytes of ``spans``, of those of ``ahead``."""
        run, parts, at = coming.here(), [], 0
        for span in ahead:
            start = self._form.place(span)[0] - at
            for part in common([span], spans):
                first, last = self._form.place(part)
                parts.append(run[first - start : last - start])
            at += self._form.bytes_of([span])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def keep(self, spans: Spans) -> None:
        """The page goes as a whole."""

    def close(self) -> None:
        """Give the memory to other pages."""
        self._ahead = self._former = self._leaving = None
        self._carrier.release(self._room)
