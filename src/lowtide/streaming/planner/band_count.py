"""Search for the number of bands of one segment."""

from __future__ import annotations

from lowtide.memory.plan_store import StoredTable
from lowtide.streaming.engine.band_schedule import max_bands, rows_of
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.segment_cost import estimate_segment, estimation_seconds

# Bands of a single segment fill their cap except for one part in this many.
_FILL_TOLERANCE = 16
# Four times the bands must shrink the peak to this share, or the search ends.
_MIN_IMPROVEMENT = 0.8


class BandCountSearch:
    """Estimated cost of one segment by number of bands, each estimated once.

    ``seconds`` is about how long the estimates take, also those that were stored before.
    """

    def __init__(
        self,
        program: StreamProgram,
        segment: Segment,
        name: str,
        store: StoredTable,
        *,
        only_segment: bool,
    ) -> None:
        self._program, self._segment, self.only_segment = program, segment, only_segment
        self._name, self._store = name, store
        self.seconds = 0.0
        self._costs: dict[int, tuple[int, int, int]] = {}
        self._window_count = max_bands(program, segment)
        self._most = max((rows.size // rows.grain for rows in rows_of(program, segment)), default=1)

    def cost(self, number: int) -> tuple[int, int, int]:
        """Return (bytes, operator calls, copied bytes) for ``number`` bands."""
        if number not in self._costs:
            even = self._round_to_windows(number)
            key = f"band count {self._name} {even}"
            found = self._store.get(key)
            self.seconds += estimation_seconds(self._segment, even)
            if found is None:
                found = estimate_segment(self._program, self._segment, even)
                self._store.put(key, found)
            self._costs[number] = found[0], found[1], found[2]
        return self._costs[number]

    def _round_to_windows(self, number: int) -> int:
        """Round ``number`` so that bands are whole windows of equal height.

        Returns at least ``number`` where windows must be cut, otherwise possibly fewer bands of the
        same height.
        """
        if number > self._window_count:
            return -(-number // self._window_count) * self._window_count
        return -(-self._window_count // -(-self._window_count // number))

    def _reduce(self, number: int, cap: int) -> int:
        """Return a number of bands in (``number`` / 2, ``number``] that fills ``cap``.

        Half of ``number`` is known to be too few. With filled caps, images of any size take nearly
        the same memory.
        """
        low = number // 2
        while number - low > max(1, number // _FILL_TOLERANCE):
            middle = (low + number) // 2
            if self.cost(middle)[0] <= cap:
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
            size, *_ = self.cost(number)
            if size <= cap:
                return self._round_to_windows(
                    self._reduce(number, cap) if self.only_segment else number
                )
            seen.append(size)
            if number >= self._most or (len(seen) > 2 and size > seen[-3] * _MIN_IMPROVEMENT):
                least = min(self._costs, key=lambda one: (self._costs[one][0], one))
                return self._round_to_windows(least)
            more = min(2 * number, self._most)
            # Try bands of one whole window before cutting any window.
            number = self._window_count if number < self._window_count < more else more
