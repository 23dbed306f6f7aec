"""Scores of forecasts, summed over windows."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from lowtide.core.errors import UsageError, install_extra
from lowtide.models.forecaster.paths import energy_score

# Steps whose sums and maxima are scored: a day of hours.
BLOCK_STEPS = 24
PIT_BINS = 10
_LEVELS = np.arange(1, 10) / 10
_LOW, _HIGH = 0.05, 0.95
# Shares inside of bands that are counted besides 90 %.
_BANDS = 80, 95
# What is told of each series.
_OF_SERIES = "mase", "smape", "mae", "mse", "crps", "coverage80", "coverage95"


class ForecastScoreSums:
    """Sums of scores over windows, of values divided by ``deviation`` [D].

    ``unit`` [D] is the error that scaled errors are of: of repeating the last season, in the part
    that was fitted to; 0 where there is none.
    """

    def __init__(self, deviation: np.ndarray, unit: np.ndarray | None = None) -> None:
        self._deviation = deviation
        self._unit = (
            np.full_like(deviation, np.nan) if unit is None else np.where(unit, unit, np.nan)
        )
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}
        self._magnitude = 0.0
        self._ranks = np.zeros(0)

    def add_points(self, truth: np.ndarray, mean: np.ndarray) -> None:
        """Add errors of ``mean`` [n, H, D]; missing targets do not count."""
        error = (mean - truth) / self._deviation
        self._add("mse", np.square(error))
        self._add("mae", np.abs(error))
        self._add("mase", np.abs(mean - truth) / self._unit)
        size = np.abs(mean) + np.abs(truth)
        self._add("smape", 200 * np.abs(mean - truth) / np.where(size > 0, size, 1.0))

    def add_samples(self, truth: np.ndarray, samples: np.ndarray) -> None:
        """Add the scores of each step of sample paths [n, S, H, D] for targets [n, H, D]."""
        # Errors, because their size and not the level of the data decides on digits; float32 is
        # enough for them and takes half the time.
        errors = (samples - truth[:, None]) / self._deviation
        errors = np.ascontiguousarray(np.moveaxis(errors, 1, -1), np.float32)
        errors.sort(axis=-1)
        seen = np.isfinite(truth)
        self._add("crps", _crps(np.where(seen, np.float32(0), np.nan), errors, ordered=True))
        loss = np.zeros(truth.shape)
        for level in _LEVELS:
            above = _quantile(errors, level)
            loss += 2 * np.maximum((1 - level) * above, -level * above) / len(_LEVELS)
        self._add("wql", loss)
        self._magnitude += float(np.nansum(np.abs(truth / self._deviation)))
        low, high = _quantile(errors, _LOW), _quantile(errors, _HIGH)
        self._add("coverage90", np.where(seen, (low <= 0) & (high >= 0), np.nan))
        for band in _BANDS:
            outside = (1 - band / 100) / 2
            inside = (_quantile(errors, outside) <= 0) & (_quantile(errors, 1 - outside) >= 0)
            self._add(f"coverage{band}", np.where(seen, inside, np.nan))
        interval = load_scoringrules().interval_score(np.where(seen, 0, np.nan), low, high, 0.1)
        self._add("winkler90", np.asarray(interval))
        self._add_ranks(errors[seen])

    def add_joint(self, truth: np.ndarray, samples: np.ndarray) -> None:
        """Add the scores of whole paths [n, S, H, D]: energy, sums and maxima of 24 steps.

        Fewer steps are one block; steps after the last whole block are left out of the sums.
        """
        truth, samples = truth / self._deviation, samples / self._deviation
        energy = [energy_score(*pair) for pair in zip(truth, samples, strict=True)]
        self._add("energy", np.array(energy))
        steps = min(BLOCK_STEPS, truth.shape[1])
        blocks = truth.shape[1] // steps
        whole = truth[:, : blocks * steps].reshape(len(truth), blocks, steps, -1)
        shape = *samples.shape[:2], blocks, steps, truth.shape[2]
        paths = np.moveaxis(samples[:, :, : blocks * steps].reshape(shape), 1, -1)
        self._add("crps_sum24", _crps(whole.sum(axis=2), paths.sum(axis=2)))
        self._add("crps_max24", _crps(whole.max(axis=2), paths.max(axis=2)))

    def means(self) -> dict[str, float]:
        """Return the mean of each score; the quantile loss is weighted by the targets' size."""
        totals = {name: float(total.sum()) for name, total in self._sums.items()}
        counts = {name: int(self._counts[name].sum()) for name in totals}
        means = {name: total / max(counts[name], 1) for name, total in totals.items()}
        if not counts.get("mase", 1):
            means.pop("mase")
        if "wql" in means:
            means["wql"] = totals["wql"] / max(self._magnitude, 1e-12)
        return means

    def of_series(self) -> list[dict[str, float]]:
        """Return the mean of each score of single steps [D], without those that are not known."""
        return [
            {
                name: float(self._sums[name][place] / self._counts[name][place])
                for name in _OF_SERIES
                if name in self._sums and self._counts[name][place]
            }
            for place in range(len(self._deviation))
        ]

    def pit(self) -> list[float]:
        """Return the shares of targets in each tenth of their distribution, 0.1 where it is right.

        The probability integral transform of a target among S samples is spread evenly over the
        interval of its rank.
        """
        if not self._ranks.sum():
            return []
        below = np.concatenate([[0.0], np.cumsum(self._ranks / self._ranks.sum())])
        edges = np.linspace(0, len(self._ranks), PIT_BINS + 1)
        return np.diff(np.interp(edges, np.arange(len(below)), below)).tolist()

    def _add_ranks(self, errors: np.ndarray) -> None:
        # Among samples that are equal to it a target is in the middle.
        below = np.count_nonzero(errors < 0, axis=-1) + np.count_nonzero(errors <= 0, axis=-1)
        ranks = np.bincount(below // 2, minlength=errors.shape[-1] + 1)
        self._ranks = ranks + (self._ranks if len(self._ranks) else 0)

    def _add(self, name: str, values: np.ndarray) -> None:
        """Add values [..., D], or [n] of all series together."""
        values = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
        self._sums[name] = self._sums.get(name, 0.0) + np.nansum(values, axis=0)
        self._counts[name] = self._counts.get(name, 0) + np.isfinite(values).sum(axis=0)


def _crps(truth: np.ndarray, members: np.ndarray, *, ordered: bool = False) -> np.ndarray:
    """Return the fair CRPS of ``members`` [..., S], by probability-weighted moments."""
    score = load_scoringrules().crps_ensemble(
        truth, members, estimator="pwm", sorted_ensemble=ordered
    )
    return np.asarray(score)


def _quantile(members: np.ndarray, level: float) -> np.ndarray:
    """Return a quantile of ascending ``members`` [..., S], linear between them."""
    place = level * (members.shape[-1] - 1)
    lower = min(int(place), members.shape[-1] - 2)
    share = place - lower
    return members[..., lower] * (1 - share) + members[..., lower + 1] * share


def load_scoringrules() -> ModuleType:
    """Return scoringrules; raises `UsageError` if it is not installed."""
    try:
        import scoringrules
    except ImportError as error:
        raise UsageError("scores need scoringrules", hint=install_extra("forecast")) from error
    return scoringrules
