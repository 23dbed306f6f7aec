"""Search for the number of bands of one segment."""

from __future__ import annotations

from lowtide.memory.cache import FactStore
from lowtide.streaming.engine.band_schedule import max_bands, rows_of
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.segment_cost import estimate_segment

# Bands of a single segment fill their cap except for one part in this many.
_FILLED = 16
# Four times the bands must shrink the peak to this share, or the search ends.
_WORTH = 0.8


class BandCountSearch:
    """Estimated cost of one segment by number of bands, each estimated once."""

    def __init__(
        self, program: StreamProgram, part: Segment, name: str, store: FactStore, *, alone: bool
    ) -> None:
        self._program, self._part, self.alone = program, part, alone
        self._name, self._store = name, store
        self._known: dict[int, tuple[int, int, int]] = {}
        self._units = max_bands(program, part)
        self._most = max((rows.size // rows.grain for rows in rows_of(program, part)), default=1)

    def at(self, number: int) -> tuple[int, int, int]:
        """Return (bytes, operator calls, copied bytes) for ``number`` bands."""
        if number not in self._known:
            even = self._even(number)
            key = f"glance {self._name} {even}"
            found = self._store.get(key)
            if found is None:
                found = estimate_segment(self._program, self._part, even)
                self._store.put(key, found)
            self._known[number] = found[0], found[1], found[2]
        return self._known[number]

    def _even(self, number: int) -> int:
        """Round ``number`` so that bands are whole windows of equal height.

        Returns at least ``number`` where windows must be cut, otherwise possibly fewer bands of the
        same height.
        """
        if number > self._units:
            return -(-number // self._units) * self._units
        return -(-self._units // -(-self._units // number))

    def _fewer(self, number: int, cap: int) -> int:
        """Return a number of bands in (``number`` / 2, ``number``] that fills ``cap``.

        Half of ``number`` is known to be too few. With filled caps, images of any size take nearly
        the same memory.
        """
        low = number // 2
        while number - low > max(1, number // _FILLED):
            middle = (low + number) // 2
            if self.at(middle)[0] <= cap:
                number = middle
            else:
                low = middle
        return number

    def fewest(self, cap: int) -> int:
        """Return the smallest number of bands whose peak stays within ``cap``.

        If none does, the number with the least peak.
        """
        number, seen = 1, list[int]()
        while True:
            size, *_ = self.at(number)
            if size <= cap:
                return self._even(self._fewer(number, cap) if self.alone else number)
            seen.append(size)
            if number >= self._most or (len(seen) > 2 and size > seen[-3] * _WORTH):
                least = min(self._known, key=lambda one: (self._known[one][0], one))
                return self._even(least)
            more = min(2 * number, self._most)
            # Try bands of one whole window before cutting any window.
            number = self._units if number < self._units < more else more
