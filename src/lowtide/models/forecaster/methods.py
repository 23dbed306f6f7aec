"""The methods by name, which of them a history has rows for, and their errors as time goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.direct import fit_dlinear, fit_four_ridges, fit_plain_ridge
from lowtide.models.forecaster.simple import SeasonalNaive, fit_ets, fit_theta
from lowtide.models.forecaster.windows import FittedMethod, GroupedMethod, MeanMethod, SeriesHistory

AUTO, NAIVE, ETS, THETA, MEAN = "auto", "naive", "ets", "theta", "mean"
PLAIN, RIDGE, DLINEAR = "plain-ridge", "ridge", "dlinear"
# What the mean is of, and those that each series has on its own.
SIMPLE = (NAIVE, ETS, THETA)
# Simple ones first: of two that are as good, the first is taken.
METHODS = (MEAN, *SIMPLE, PLAIN, DLINEAR, RIDGE)

# ETS and Theta look for parameters series by series, and more rows add nothing to them.
MOST_ROWS, _LONGEST_SEASON = 2000, 24

_OF_ONE: dict[str, Callable[[np.ndarray, int, int], FittedMethod | None]] = {
    NAIVE: SeasonalNaive.fit,
    ETS: fit_ets,
    THETA: fit_theta,
}
_OF_ALL: dict[str, Callable[[SeriesHistory, int], FittedMethod | None]] = {
    PLAIN: fit_plain_ridge,
    DLINEAR: fit_dlinear,
    RIDGE: fit_four_ridges,
}

# Where methods are fitted again, so that what follows is forecast by one that has not seen it.
_CUTS = 3
# Rows before the first of them, at least.
_FEWEST_ROWS = 7
# Numbers of a method's errors at most, and origins whatever those are.
_MOST_NUMBERS, _FEWEST_ORIGINS = 1 << 22, 8


def reason_left_out(name: str, history: SeriesHistory) -> str | None:
    """Return why ``name`` is not fitted to a history of any length like this one; None if it is."""
    steps = len(history.values)
    if name in (ETS, THETA, MEAN) and steps > MOST_ROWS:
        return f"{steps:,} rows are more than {MOST_ROWS:,}"
    if name == ETS and history.season > _LONGEST_SEASON:
        return f"a season of {history.season} steps is longer than {_LONGEST_SEASON}"
    return None


def fit_method(name: str, history: SeriesHistory, horizon: int) -> FittedMethod | None:
    """Fit the method called ``name``; None where the history has too few rows for it."""
    if name == MEAN:
        parts = [fit_method(one, history, horizon) for one in SIMPLE]
        return mean_method([one for one in parts if one is not None])
    if reason_left_out(name, history) is not None:
        return None
    if name in _OF_ALL:
        return _OF_ALL[name](history, horizon)
    return _grouped(_OF_ONE[name], history, horizon)


def mean_method(parts: list[FittedMethod]) -> FittedMethod | None:
    """Return the mean of methods; None of a single one, which it would only repeat."""
    return MeanMethod(tuple(parts)) if len(parts) > 1 else None


def _grouped(
    fit: Callable[[np.ndarray, int, int], FittedMethod | None], history: SeriesHistory, horizon: int
) -> FittedMethod | None:
    """Fit variables that begin together at once, so that no step before their first is seen."""
    first, steps = history.first, len(history.values)
    parts = []
    for start in np.unique(first[first < steps]).tolist():
        columns = np.flatnonzero(first == start)
        fitted = fit(history.filled[start:, columns], history.season, horizon)
        if fitted is not None:
            parts.append((columns, start, fitted))
    return GroupedMethod((horizon, len(first)), tuple(parts)) if parts else None


@dataclass(frozen=True)
class HeldOutErrors:
    """Forecasts that were judged, of several methods at the same origins.

    Attributes:
        origins: Forecast origins [n], ascending; the last have fewer targets than steps ahead.
        windows: How many of the windows do not overlap.
        errors: Errors [n, H, D] of each method, by name: NaN without a target, and of variables
            that a method could not be fitted to.
    """

    origins: np.ndarray
    windows: float
    errors: dict[str, np.ndarray]


def fit_methods(names: list[str], history: SeriesHistory, horizon: int) -> dict[str, FittedMethod]:
    """Fit methods, those that the mean is of once; without those that have too few rows."""
    own = [one for one in names if one != MEAN]
    wanted = [*own, *(one for one in SIMPLE if MEAN in names and one not in own)]
    found = {name: fit_method(name, history, horizon) for name in wanted}
    if MEAN in names:
        found[MEAN] = mean_method([one for name in SIMPLE if (one := found[name]) is not None])
    return {name: one for name in names if (one := found.get(name)) is not None}


def held_out_errors(
    history: SeriesHistory, horizon: int, names: list[str], share: float = 0.5, cuts: int = _CUTS
) -> HeldOutErrors:
    """Return the errors of methods at origins after the first ``share`` of a history.

    Methods are fitted again at each of a few ``cuts``, to what was known there. Those that have too
    few rows at one of them are left out.
    """
    steps, variables = history.values.shape
    seasons = min(2 * history.season + 1, steps - horizon)
    first = max(int(steps * share), _FEWEST_ROWS, seasons)
    most = max(_FEWEST_ORIGINS, _MOST_NUMBERS // (horizon * variables))
    stride = max(1, -(-(steps - first) // most))
    origins = np.arange(first, steps, stride)
    if not len(origins):
        return HeldOutErrors(origins, 0.0, {})
    after = np.concatenate([history.values, np.full((horizon, variables), np.nan)])
    errors: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for part in np.array_split(origins, min(cuts, len(origins))):
        targets = after[part[:, None] + np.arange(horizon)]
        for name, one in fit_methods(names, history.until(int(part[0])), horizon).items():
            errors[name].append(targets - one.predict(history.filled, part))
    whole = {
        name: np.concatenate(found)
        for name, found in errors.items()
        if sum(map(len, found)) == len(origins)
    }
    return HeldOutErrors(origins, (steps - first) / horizon, whole)


def repeated_errors(history: SeriesHistory, origins: np.ndarray, horizon: int) -> np.ndarray:
    """Return the errors [n, H, D] of repeating the last season before each of ``origins`` [n].

    A season that is longer than what comes before the first of them counts as none.
    """
    steps, variables = history.values.shape
    season = history.season if not len(origins) or history.season <= origins[0] else 1
    ahead = np.arange(horizon)
    after = np.concatenate([history.values, np.full((horizon, variables), np.nan)])
    before = history.filled[np.minimum(origins[:, None] - season + ahead % season, steps - 1)]
    return after[origins[:, None] + ahead] - before
