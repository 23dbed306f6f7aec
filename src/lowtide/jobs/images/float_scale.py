"""Conversion between float samples of any range and a network's 0..1."""

from __future__ import annotations

import numpy as np

from lowtide.media.image_info import ValueRange


class FloatScale:
    """Conversion of float color of a `ValueRange`, which keeps what is beyond.

    Denoisers take black to white as 0..1, in proportion, so that noise stays what it is. Others
    take all values into 0..1, and what is far beyond black and white by its logarithm: a network
    errs by a share of 0..1, which is little of the brightest star and all of the sky around it.
    """

    def __init__(self, known: ValueRange) -> None:
        self._known, self._span = known, known.white - known.low
        self._above = max(self._linear(known.most) - 1, 0.0)
        self._below = max(-self._linear(known.least), 0.0)
        # Each side has as much of 0..1 as in proportion, at most as much as black to white.
        above, below = min(self._above, 1.0), min(self._below, 1.0)
        self._start = below / (1 + above + below)
        self._end = 1 - above / (1 + above + below)

    @property
    def share(self) -> float:
        """What black to white is of 0..1 in `compressed`."""
        return self._end - self._start

    def _linear(self, value: float) -> float:
        return (value - self._known.low) / self._span

    def to_unit(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 samples, 0 at black and 1 at white; the mean where they are not finite."""
        known = np.where(np.isfinite(samples), samples, np.float32(self._known.mean))
        return ((known - self._known.low) / self._span).astype(np.float32)

    def from_unit(self, unit: np.ndarray) -> np.ndarray:
        """Return samples, float32, of what `to_unit` returned."""
        return (unit * np.float64(self._span) + self._known.low).astype(np.float32)

    def compressed(self, unit: np.ndarray) -> np.ndarray:
        """Return what `to_unit` returned in 0..1, whatever its range."""
        made = self._start + (self._end - self._start) * unit.clip(0, 1)
        for sign, _, share, most in self._sides():
            excess = (sign * unit - max(sign, 0)).clip(0, most)
            made += sign * share / np.log1p(most) * np.log1p(excess)
        return made.astype(np.float32)

    def expanded(self, made: np.ndarray) -> np.ndarray:
        """Return the inverse of `compressed`."""
        unit = ((made - self._start) / (self._end - self._start)).clip(0, 1).astype(np.float64)
        for sign, edge, share, most in self._sides():
            beyond = (sign * (made - edge)).clip(0, share).astype(np.float64)
            unit += sign * np.expm1(beyond / share * np.log1p(most))
        return unit.astype(np.float32)

    def _sides(self) -> list[tuple[int, float, float, float]]:
        """Return sign, edge and share in 0..1, and the most excess of what is beyond an end."""
        sides = [
            (1, self._end, 1 - self._end, self._above),
            (-1, self._start, self._start, self._below),
        ]
        return [one for one in sides if one[-1]]
