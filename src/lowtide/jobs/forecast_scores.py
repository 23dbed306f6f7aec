"""Scores of forecasts, summed over windows."""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import UsageError

_LEVELS = np.arange(1, 10) / 10
_LOW, _HIGH = 0.05, 0.95


class Scores:
    """Sums of scores over windows, of values divided by ``deviation`` [D]."""

    def __init__(self, deviation: np.ndarray) -> None:
        self._deviation = deviation
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._magnitude = 0.0

    def add_points(self, truth: np.ndarray, mean: np.ndarray) -> None:
        """Add squared and absolute errors of ``mean`` [n, H, D]; missing targets do not count."""
        error = (mean - truth) / self._deviation
        self._add("mse", np.square(error))
        self._add("mae", np.abs(error))

    def add_samples(self, truth: np.ndarray, samples: np.ndarray) -> None:
        """Add the scores of sample paths [n, S, H, D] for targets [n, H, D]."""
        try:
            import scoringrules
        except ImportError as error:
            raise UsageError(
                "scores need scoringrules", hint="pip install 'lowtide[forecast]'"
            ) from error
        truth = truth / self._deviation
        members = np.sort(np.moveaxis(samples, 1, -1) / self._deviation[:, None], axis=-1)
        # By probability-weighted moments: the fair estimator, in one pass over sorted members.
        crps = scoringrules.crps_ensemble(truth, members, estimator="pwm", sorted_ensemble=True)
        self._add("crps", np.asarray(crps))
        quantiles = np.quantile(members, _LEVELS, axis=-1)
        levels = _LEVELS.reshape(-1, 1, 1, 1)
        loss = 2 * np.maximum(levels * (truth - quantiles), (levels - 1) * (truth - quantiles))
        self._add("wql", loss.mean(axis=0))
        self._magnitude += float(np.nansum(np.abs(truth)))
        low, high = np.quantile(members, (_LOW, _HIGH), axis=-1)
        seen = np.isfinite(truth)
        self._add("coverage90", np.where(seen, (truth >= low) & (truth <= high), np.nan))
        outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
        self._add("winkler90", high - low + outside / _LOW)

    def means(self) -> dict[str, float]:
        """Return the mean of each score; the quantile loss is weighted by the targets' size."""
        means = {name: total / max(self._counts[name], 1) for name, total in self._sums.items()}
        if "wql" in means:
            means["wql"] = self._sums["wql"] / max(self._magnitude, 1e-12)
        return means

    def _add(self, name: str, values: np.ndarray) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(np.nansum(values))
        self._counts[name] = self._counts.get(name, 0) + int(np.isfinite(values).sum())
