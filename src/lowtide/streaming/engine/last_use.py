"""The last of several sets of rows that has a row."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from lowtide.streaming.spans import Span, Spans


class LastUseMap:
    """For each of ``size`` rows the last number that was put there, -1 at first.

    Rows may be a million; what is kept are their runs of one number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # By run its first row and its number; it ends where the next one starts.
        self._starts, self._numbers = array("q", [0]), array("q", [-1])

    def put(self, span: Span, number: int) -> None:
        """The rows of ``span``, which is not empty, have this number from now on."""
        first, last = span
        starts, numbers = self._starts, self._numbers
        low, high = bisect_left(starts, first), bisect_left(starts, last)
        new_starts, new_numbers = [first], [number]
        if last < self.size and (high == len(starts) or starts[high] != last):
            # The run that reaches over the end goes on behind it.
            new_starts.append(last)
            new_numbers.append(numbers[high - 1])
        starts[low:high] = array("q", new_starts)
        numbers[low:high] = array("q", new_numbers)

    def above(self, span: Span, number: int) -> Spans:
        """Of the rows of ``span`` those that have a larger number."""
        first, last = span
        low = bisect_right(self._starts, first) - 1
        high = bisect_left(self._starts, last, low)
        if high - low == 1:  # nearly always
            return [span] if self._numbers[low] > number else []
        larger = np.frombuffer(self._numbers, np.int64)[low:high] > number
        edges = np.flatnonzero(np.diff(larger, prepend=False, append=False)) + low
        rows = [max(self._starts[at], first) if at < high else last for at in edges]
        return list(zip(rows[::2], rows[1::2], strict=True))
