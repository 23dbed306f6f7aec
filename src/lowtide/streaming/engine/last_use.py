"""Map from each row to the last number written to it, stored as runs."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from lowtide.streaming.spans import Span, Spans


class LastUseMap:
    """Last number put at each of ``size`` rows, -1 at first; stored as runs.

    Only runs of equal numbers are stored, since there may be a million rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # First row and number of each run; a run ends where the next one starts.
        self._starts, self._numbers = array("q", [0]), array("q", [-1])

    def put(self, span: Span, number: int) -> None:
        """Set the number of all rows of ``span``, which must not be empty."""
        first, last = span
        starts, numbers = self._starts, self._numbers
        low, high = bisect_left(starts, first), bisect_left(starts, last)
        new_starts, new_numbers = [first], [number]
        if last < self.size and (high == len(starts) or starts[high] != last):
            # keep the rest of the run that extends beyond the end
            new_starts.append(last)
            new_numbers.append(numbers[high - 1])
        starts[low:high] = array("q", new_starts)
        numbers[low:high] = array("q", new_numbers)

    def above(self, span: Span, number: int) -> Spans:
        """Return the spans of rows within ``span`` whose number is larger than ``number``."""
        first, last = span
        low = bisect_right(self._starts, first) - 1
        high = bisect_left(self._starts, last, low)
        if high - low == 1:  # nearly always
            return [span] if self._numbers[low] > number else []
        larger = np.frombuffer(self._numbers, np.int64)[low:high] > number
        edges = np.flatnonzero(np.diff(larger, prepend=False, append=False)) + low
        rows = [max(self._starts[at], first) if at < high else last for at in edges]
        return list(zip(rows[::2], rows[1::2], strict=True))
