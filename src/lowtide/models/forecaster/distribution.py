"""What a forecaster says of windows: a mean and a scale, from which sample paths are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.paths import PathSampler


@dataclass(frozen=True)
class Scaler:
    """Mean and standard deviation [D] that a series is standardized by."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> Scaler:
        """Fit to ``values`` [T, D]; a constant variable keeps its unit."""
        mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
        constant = deviation <= 1e-12 * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, deviation))

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Return standardized values [..., D]."""
        return (values - self.mean) / self.deviation

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return values [..., D] in the series' own units."""
        return values * self.deviation + self.mean


@dataclass(frozen=True)
class Distribution:
    """Forecast distributions of n windows in the series' own units.

    ``origins`` [n] are the windows' forecast origins, ``mean`` and ``scale`` are [n, H, D].
    """

    origins: np.ndarray
    mean: np.ndarray
    scale: np.ndarray

    def __getitem__(self, part: slice) -> Distribution:
        return Distribution(self.origins[part], self.mean[part], self.scale[part])

    def sample(self, paths: PathSampler, samples: int, *, seed: int) -> np.ndarray:
        """Return sample paths [n, samples, H, D]: the mean plus the scale times drawn ``paths``.

        Beyond the result, memory does not grow with the number of samples.
        """
        count, *shape = self.mean.shape
        result = np.empty((count, samples, *shape))
        for number, origin in enumerate(self.origins.tolist()):
            paths.sample(origin, result[number], seed=seed)
            result[number] *= self.scale[number]
            result[number] += self.mean[number]
        return result
