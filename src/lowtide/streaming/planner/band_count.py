"""What a segment takes in how many bands, and how few do."""

from __future__ import annotations

from lowtide.memory.cache import FactStore
from lowtide.streaming.engine.band_schedule import max_bands, rows_of
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.segment_cost import estimate_segment

# Bands of a single segment fill what they may take but for this part of it.
_FILLED = 16
# Four times the bands have to save so much, or no more are tried.
_WORTH = 0.8


class BandCountSearch:
    """What one segment takes in how many bands, each looked at once."""

    def __init__(
        self, program: StreamProgram, part: Segment, name: str, store: FactStore, *, alone: bool
    ) -> None:
        self._program, self._part, self.alone = program, part, alone
        self._name, self._store = name, store
        self._known: dict[int, tuple[int, int, int]] = {}
        self._units = max_bands(program, part)
        self._most = max((rows.size // rows.grain for rows in rows_of(program, part)), default=1)

    def at(self, number: int) -> tuple[int, int, int]:
        """(bytes, calls, bytes put together) in so many bands."""
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
        """As many bands as there are whole windows for, or fewer that are as high at most."""
        if number > self._units:
            return -(-number // self._units) * self._units
        return -(-self._units // -(-self._units // number))

    def _fewer(self, number: int, cap: int) -> int:
        """Between half of ``number``, which is too few, and ``number``, so that bands fill
        ``cap``: images of any size then take nearly the same."""
        low = number // 2
        while number - low > max(1, number // _FILLED):
            middle = (low + number) // 2
            if self.at(middle)[0] <= cap:
                number = middle
            else:
                low = middle
        return number

    def fewest(self, cap: int) -> int:
        """The fewest bands that stay below ``cap``, or those that take least."""
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
            # A whole window each, before any is cut.
            number = self._units if number < self._units < more else more
