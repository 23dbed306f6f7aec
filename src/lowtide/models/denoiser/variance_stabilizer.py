"""Transform of linear values after which shot and read noise is of one strength everywhere.

The generalized Anscombe transform, written from its zero so that pure Gaussian noise is a case like
any other, and its exact unbiased inverse: the mean of transformed values is not the transform of
their mean, and the plain inverse would darken shadows (Mäkitalo and Foi, "Optimal inversion of the
generalized Anscombe transformation for Poisson-Gaussian noise", 2013, the closed form).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_OFFSET = 3 / 8
_ROOT = math.sqrt(3 / 2)
# Transformed value of no photons and no read noise, below which the closed form is no inverse.
_LEAST = math.sqrt(3 / 2)


@dataclass(frozen=True)
class VarianceStabilizer:
    """Transform for noise of variance ``a``·x + ``b``² at a value of x.

    0 becomes 0 and ``top`` becomes 1, whose noise has the standard deviation `sigma` everywhere
    where x is not much below 0.
    """

    a: float
    b: float
    top: float = 1.0

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b >= 0 and self.a + self.b > 0 and self.top > 0):
            raise ValueError(f"no noise to stabilize: {self}")

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of transformed values."""
        return 1 / float(self._stabilized(np.array(self.top)))

    def value_at_sigma(self, sigma: float) -> float:
        """Return the ``top`` with which transformed noise would have this standard deviation."""
        stable = 1 / sigma
        return stable * (math.sqrt(self._floor) + self.a / 4 * stable)

    @property
    def _floor(self) -> float:
        """Variance at 0, with what the transform of Poisson counts adds to it."""
        return _OFFSET * self.a**2 + self.b**2

    def _stabilized(self, values: np.ndarray) -> np.ndarray:
        root = np.sqrt(np.maximum(self.a * values + self._floor, 0))
        least = -self._floor / self.a if self.a else -np.inf
        return 2 * np.maximum(values, least) / (root + math.sqrt(self._floor))

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Return transformed values, float32, of linear ones of any shape."""
        return (self._stabilized(values) * self.sigma).astype(np.float32)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return the linear values, float32, whose noisy ones have these transformed means."""
        stable, floor = values / np.float32(self.sigma), math.sqrt(self._floor)
        found = stable * (floor + self.a / 4 * stable)
        if self.a:
            # The transform in units of photons: what the plain inverse lacks depends on it alone.
            photons = 1 / np.maximum(2 * floor / self.a + stable, _LEAST)
            lacking = _ROOT / 4 - photons * (11 / 8 - photons * (5 / 8 * _ROOT))
            found = found + self.a * (1 / 4 + photons * lacking)
        return found.astype(np.float32)
