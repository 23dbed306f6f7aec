"""Seasonal adjustment: one index for each step of a season, found by a moving average.

The classical decomposition, multiplicative where all values are well above zero. Indices are drawn
to nothing by as much of them as chance explains (James and Stein, "Estimation with Quadratic Loss",
1961): a strong season is found in two of them, and none in noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FEWEST_SEASONS = 2
# Least value, as a share of the mean, of a series whose changes are taken as relative ones.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Seasonal:
    """Seasonal indices of D series.

    Attributes:
        indices: Index [m, D] of each step of a season, counted from the first step of the series;
            0 where nothing is added, 1 where nothing is multiplied.
        relative: Mask [D] of series whose indices are factors.
    """

    indices: np.ndarray
    relative: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, season: int) -> Seasonal:
        """Fit to ``values`` [T, D] without NaN."""
        relative = values.min(axis=0) > _LEAST_SHARE * np.abs(values.mean(axis=0))
        none = np.where(relative, 1.0, np.zeros((season, values.shape[1])))
        if season == 1 or len(values) <= _FEWEST_SEASONS * season:
            return cls(none, relative)
        around = _moving_average(values, season)
        steps = np.arange(season // 2, season // 2 + len(around))
        level = np.where(relative, around, 1.0)
        rest = np.where(relative, values[steps] / level, values[steps] - around)
        found = np.stack([rest[steps % season == one].mean(axis=0) for one in range(season)])
        mean = found.mean(axis=0)
        unit = np.where(relative, mean, 1.0)
        indices, rest = found / unit - (mean / unit), rest / unit - (mean / unit)
        return cls(none + indices * _kept(indices, rest, steps % season), relative)

    def remove(self, values: np.ndarray) -> np.ndarray:
        """Return ``values`` [T, D], from the first step on, without their season."""
        own = self.indices[np.arange(len(values)) % len(self.indices)]
        return np.where(self.relative, values / np.where(self.relative, own, 1.0), values - own)

    def add(self, values: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return ``values`` [..., D] of ``steps`` [...] with their season."""
        own = self.indices[steps % len(self.indices)]
        return np.where(self.relative, values * own, values + own)


def _moving_average(values: np.ndarray, season: int) -> np.ndarray:
    """Return means over a season around each step of ``values`` [T, D] that has one."""
    sums = np.cumsum(np.concatenate([np.zeros((1, values.shape[1])), values]), axis=0)
    means = (sums[season:] - sums[:-season]) / season
    return means if season % 2 else (means[1:] + means[:-1]) / 2


def _kept(indices: np.ndarray, rest: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Return the share [D] of ``indices`` [m, D] that is not chance.

    ``rest`` [n, D] are what they are means of, at ``phases`` [n].
    """
    around = np.square(rest - indices[phases]).sum(axis=0) / max(len(rest) - len(indices), 1)
    between = np.square(indices[phases]).sum(axis=0) / (len(indices) - 1)
    return np.maximum(0.0, 1 - around / np.where(between > 0, between, np.inf))
