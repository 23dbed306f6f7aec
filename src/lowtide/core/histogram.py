"""Counts of numbers of any size, from which quantiles are read to 0.1 %."""

from __future__ import annotations

import numpy as np

# Bits of a float32 that are counted: sign, exponent and ten of the mantissa.
_DROPPED = 13
_BINS = 1 << (32 - _DROPPED)
_SIGN = np.uint32(1 << 31)


class FloatHistogram:
    """Counts of float32 values in bins as wide as a thousandth of the value."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count finite values, of any shape."""
        # As integers, positive floats ascend with their bits and negative ones descend.
        bits = np.ascontiguousarray(values, np.float32).ravel().view(np.uint32)
        places = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint32(_DROPPED)
        np.add.at(self._counts, places, 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self._counts.sum())

    def filled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return values and counts of the bins that are not empty, in ascending order."""
        places = np.flatnonzero(self._counts).astype(np.uint32)
        # Values at the beginning of their bin: whole numbers of few bits are exact.
        codes = places << np.uint32(_DROPPED)
        bits = np.where(codes & _SIGN, codes ^ _SIGN, ~codes)
        return bits.view(np.float32).astype(np.float64), self._counts[places]

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all lies, interpolated between bins."""
        values, counts = self.filled()
        middles = np.cumsum(counts) - counts / 2
        return float(np.interp(share * middles[-1] + share * counts[-1] / 2, middles, values))
