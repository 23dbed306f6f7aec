"""Simple methods for each series on its own: a season ago with a drift, ETS and Theta.

ETS is the best by AICc of a level, a trend and a damped trend (Hyndman et al., "Forecasting with
Exponential Smoothing", 2008), as statsmodels estimates them. Theta is a level with half of the
slope of a straight line (Hyndman and Billah, "Unmasking the Theta method", 2003), of logarithms
where a series is well above zero.

Series are adjusted by the classical decomposition, multiplicative where all values are well above
zero: one index for each step of a season, found by a moving average. Indices are drawn to nothing
by as much of them as chance explains (James and Stein, "Estimation with Quadratic Loss", 1961): a
strong season is found in two of them, and none in noise.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Shapes of ETS, and the values that they need.
_SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"trend": "add"},
    {"trend": "add", "damped_trend": True},
)
_FEWEST, _FEWEST_WITH_TREND, _FEWEST_HEURISTIC = 6, 10, 10
_SHARES = np.linspace(0.05, 1.0, 20)

_FEWEST_SEASONS = 2
# Least value, as a share of the mean, of a series whose changes are taken as relative ones.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class SmoothingMethod:
    """Level and slope of D adjusted series; parameters are arrays [D].

    Attributes:
        horizon: Steps ahead, H.
        seasonal: Season that is taken off before and put back after.
        logs: Mask of series whose logarithms are smoothed.
        level: Level before the first step.
        slope: Slope before the first step.
        alpha: Share of an error that the level follows.
        beta: Share of an error that the slope follows.
        phi: Share of a slope that is left after a step.
        deviation: Standard deviation of the errors one step ahead.
    """

    horizon: int
    seasonal: SeasonalIndices
    logs: np.ndarray
    level: np.ndarray
    slope: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    phi: np.ndarray
    deviation: np.ndarray

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        ahead = np.arange(1, self.horizon)[:, None]
        reply = self.alpha + self.beta * np.cumsum(self.phi**ahead, axis=0)
        later = 1 + np.cumsum(np.square(reply), axis=0)
        return np.sqrt(np.concatenate([np.ones((1, len(self.alpha))), later]))

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        levels, slopes, _ = self._follow(self._adjusted(values[: int(origins.max())]))
        weights = np.cumsum(self.phi ** np.arange(1, self.horizon + 1)[:, None], axis=0)
        mean = levels[origins][:, None] + weights * slopes[origins][:, None]
        return self._restored(mean, origins[:, None] + np.arange(self.horizon))

    def measured(self, values: np.ndarray, parameters: int) -> SmoothingMethod:
        """Return the same with the deviation that errors on ``values`` [T, D] have."""
        levels, slopes, _ = self._follow(self._adjusted(values))
        ahead = levels[:-1] + self.phi * slopes[:-1]
        errors = values - self._restored(ahead, np.arange(len(values)))
        freedom = max(len(values) - parameters, 1)
        return replace(self, deviation=np.sqrt(np.square(errors).sum(axis=0) / freedom))

    def squares(self, values: np.ndarray) -> np.ndarray:
        """Return the sums [D] of squared errors one step ahead of adjusted ``values`` [T, D]."""
        return np.square(self._follow(self._adjusted(values))[2]).sum(axis=0)

    def _adjusted(self, values: np.ndarray) -> np.ndarray:
        adjusted = self.seasonal.remove(values)
        # What comes after the fit may fall to 0; its logarithm stays a number.
        floor = np.exp(np.where(self.logs, self.level, 0.0)) * 1e-3
        return np.where(self.logs, np.log(np.maximum(adjusted, floor)), adjusted)

    def _restored(self, mean: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return self.seasonal.add(np.where(self.logs, np.exp(np.minimum(mean, 700.0)), mean), steps)

    def _follow(self, adjusted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return level and slope [T + 1, D] before each step and after the last, and errors."""
        levels, slopes = np.empty((2, len(adjusted) + 1, len(self.alpha)))
        errors = np.empty_like(adjusted)
        levels[0], slopes[0] = self.level, self.slope
        for step, value in enumerate(adjusted):
            kept = self.phi * slopes[step]
            errors[step] = value - levels[step] - kept
            levels[step + 1] = levels[step] + kept + self.alpha * errors[step]
            slopes[step + 1] = kept + self.beta * errors[step]
        return levels, slopes, errors


def fit_theta(values: np.ndarray, season: int, horizon: int) -> SmoothingMethod | None:
    """Fit Theta to ``values`` [T, D] without NaN; None where they are too few."""
    if len(values) < _FEWEST:
        return None
    seasonal = SeasonalIndices.fit(values, season)
    zeros, ones = np.zeros(values.shape[1]), np.ones(values.shape[1])
    logs, adjusted = seasonal.relative, seasonal.remove(values)
    adjusted = np.where(logs, np.log(np.where(logs, adjusted, 1.0)), adjusted)
    centered = np.arange(len(values)) - (len(values) - 1) / 2
    slope = centered @ (adjusted - adjusted.mean(axis=0)) / np.square(centered).sum() / 2
    start = adjusted[0] - slope
    plain = SmoothingMethod(horizon, seasonal, logs, start, slope, ones, zeros, ones, zeros)
    tried = [replace(plain, alpha=share * ones).squares(values) for share in _SHARES]
    alpha = _SHARES[np.argmin(tried, axis=0)]
    return replace(plain, alpha=alpha).measured(values, 2)


def fit_ets(values: np.ndarray, season: int, horizon: int) -> SmoothingMethod | None:
    """Fit ETS to ``values`` [T, D] without NaN; None where they are too few."""
    if len(values) < _FEWEST:
        return None
    seasonal = SeasonalIndices.fit(values, season)
    adjusted = seasonal.remove(values).T
    found = [_fit_one(*one) for one in zip(adjusted, seasonal.relative, strict=True)]
    level, slope, alpha, beta, phi = np.array(found).T
    logs, zeros = np.zeros(values.shape[1], bool), np.zeros(values.shape[1])
    made = SmoothingMethod(horizon, seasonal, logs, level, slope, alpha, beta, phi, zeros)
    return made.measured(values, 3)


def _fit_one(series: np.ndarray, relative: bool) -> tuple[float, float, float, float, float]:
    """Return level, slope, alpha, beta and phi of one series [T], by AICc."""
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    center = 0.0 if relative else series.mean()
    unit = np.abs(series).mean() if relative else series.std()
    if series.std() <= 1e-9 * np.abs(series).max():
        return series[0], 0.0, 0.5, 0.0, 0.0
    fits = []
    for shape in _SHAPES[: 3 if len(series) >= _FEWEST_WITH_TREND else 1]:
        start = "heuristic" if len(series) >= _FEWEST_HEURISTIC else "estimated"
        error = "mul" if relative else "add"
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of searches that stop early: AICc judges them
            model = ETSModel((series - center) / unit, error, initialization_method=start, **shape)
            fits.append(model.fit(disp=False))
    best = min(fits, key=lambda fit: fit.aicc if np.isfinite(fit.aicc) else np.inf)
    own = dict(zip(best.param_names, best.params, strict=True))
    slope = float(best.initial_trend) if "smoothing_trend" in own else 0.0
    phi = own.get("damping_trend", 1.0 if "smoothing_trend" in own else 0.0)
    level = float(best.initial_level) * unit + center
    return level, slope * unit, own["smoothing_level"], own.get("smoothing_trend", 0.0), phi


@dataclass(frozen=True)
class SeasonalIndices:
    """Seasonal indices of D series.

    Attributes:
        indices: Index [m, D] of each step of a season, counted from the first step of the series;
            0 where nothing is added, 1 where nothing is multiplied.
        relative: Mask [D] of series whose indices are factors.
    """

    indices: np.ndarray
    relative: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, season: int) -> SeasonalIndices:
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


@dataclass(frozen=True)
class SeasonalNaive:
    """Seasonal naive with drift of D series.

    Attributes:
        season: Steps of a season; 1 repeats the last value.
        horizon: Steps ahead, H.
        drift: What a series [D] gains in each season.
        deviation: Standard deviation [D] of its changes from season to season; NaN of one value.
    """

    season: int
    horizon: int
    drift: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, season: int, horizon: int) -> SeasonalNaive:
        """Fit to ``values`` [T, D] without NaN; too few for a season have none."""
        season = season if len(values) > season + 1 else 1
        if len(values) == 1:
            nothing = np.zeros(values.shape[1])
            return cls(season, horizon, nothing, np.full_like(nothing, np.nan))
        changes = values[season:] - values[:-season]
        drift, freedom = changes.mean(axis=0), max(len(changes) - 1, 1)
        around = np.square(changes - drift).sum(axis=0) / freedom
        # What a drift is worth: its square beside that of its own error, of changes that overlap.
        error = around / max(len(changes) / season, 1.0) if len(changes) > 1 else np.inf
        drift = drift * (np.square(drift) / np.maximum(np.square(drift) + error, 1e-300))
        deviation = np.sqrt(np.square(changes - drift).sum(axis=0) / freedom)
        return cls(season, horizon, drift, deviation)

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        seasons = np.arange(self.horizon) // self.season + 1
        return np.repeat(np.sqrt(seasons)[:, None], len(self.drift), axis=1)

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        ahead = np.arange(self.horizon)
        mean = values[origins[:, None] - self.season + ahead % self.season]
        return mean + (ahead // self.season + 1)[:, None] * self.drift
