"""Seasonal adjustment: one index for each step of a season, found by a moving average.

The classical decomposition, multiplicative where all values are well above zero, and only of series
whose autocorrelation at the season is significant, as in Assimakopoulos and Nikolopoulos, "The
theta model: a decomposition approach to forecasting", 2000.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Of the normal distribution: 90 % of series without a season are found to have none.
_SIGNIFICANT = 1.645
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
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.where(relative, values[steps] / around, values[steps] - around)
        found = np.stack([rest[steps % season == one].mean(axis=0) for one in range(season)])
        mean = found.mean(axis=0)
        found = np.where(relative, found / np.where(relative, mean, 1.0), found - mean)
        return cls(np.where(_is_seasonal(values, season), found, none), relative)

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


def _is_seasonal(values: np.ndarray, season: int) -> np.ndarray:
    """Return the mask [D] of series whose autocorrelation at the season is significant."""
    centered = values - values.mean(axis=0)
    power = np.square(centered).sum(axis=0)
    power = np.where(power > 0, power, 1.0)
    lags = [(centered[lag:] * centered[:-lag]).sum(axis=0) / power for lag in range(1, season + 1)]
    limit = np.sqrt((1 + 2 * np.square(lags[:-1]).sum(axis=0)) / len(values))
    return np.abs(lags[-1]) > _SIGNIFICANT * limit
