"""The methods by name, and which of them a history has rows for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowtide.models.forecaster.direct import fit_four_ridges, fit_plain_ridge
from lowtide.models.forecaster.dlinear import fit_dlinear
from lowtide.models.forecaster.history import Fitted, Grouped, History, MeanOf
from lowtide.models.forecaster.naive import Naive
from lowtide.models.forecaster.smoothing import fit_ets, fit_theta

AUTO, NAIVE, ETS, THETA, MEAN = "auto", "naive", "ets", "theta", "mean"
PLAIN, RIDGE, DLINEAR = "plain-ridge", "ridge", "dlinear"
# What the mean is of, and those that each series has on its own.
SIMPLE = (NAIVE, ETS, THETA)
# Simple ones first: of two that are as good, the first is taken.
METHODS = (MEAN, *SIMPLE, PLAIN, DLINEAR, RIDGE)

# ETS and Theta look for parameters series by series, and more rows add nothing to them.
MOST_ROWS, _LONGEST_SEASON = 2000, 24

_OF_ONE: dict[str, Callable[[np.ndarray, int, int], Fitted | None]] = {
    NAIVE: Naive.fit,
    ETS: fit_ets,
    THETA: fit_theta,
}
_OF_ALL: dict[str, Callable[[History, int], Fitted | None]] = {
    PLAIN: fit_plain_ridge,
    DLINEAR: fit_dlinear,
    RIDGE: fit_four_ridges,
}


def left_out(name: str, history: History) -> str | None:
    """Return why ``name`` is not fitted to a history of any length like this one; None if it is."""
    steps = len(history.values)
    if name in (ETS, THETA, MEAN) and steps > MOST_ROWS:
        return f"{steps:,} rows are more than {MOST_ROWS:,}"
    if name == ETS and history.season > _LONGEST_SEASON:
        return f"a season of {history.season} steps is longer than {_LONGEST_SEASON}"
    return None


def fit_method(name: str, history: History, horizon: int) -> Fitted | None:
    """Fit the method called ``name``; None where the history has too few rows for it."""
    if name == MEAN:
        parts = [fit_method(one, history, horizon) for one in SIMPLE]
        return mean_of([one for one in parts if one is not None])
    if left_out(name, history) is not None:
        return None
    if name in _OF_ALL:
        return _OF_ALL[name](history, horizon)
    return _grouped(_OF_ONE[name], history, horizon)


def mean_of(parts: list[Fitted]) -> Fitted | None:
    """Return the mean of methods; None of a single one, which it would only repeat."""
    return MeanOf(tuple(parts)) if len(parts) > 1 else None


def _grouped(
    fit: Callable[[np.ndarray, int, int], Fitted | None], history: History, horizon: int
) -> Fitted | None:
    """Fit variables that begin together at once, so that no step before their first is seen."""
    first, steps = history.first, len(history.values)
    parts = []
    for start in np.unique(first[first < steps]).tolist():
        columns = np.flatnonzero(first == start)
        fitted = fit(history.filled[start:, columns], history.season, horizon)
        if fitted is not None:
            parts.append((columns, start, fitted))
    return Grouped((horizon, len(first)), tuple(parts)) if parts else None
