"""Rolling origins: errors of methods that are fitted again as time goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.history import Fitted, History
from lowtide.models.forecaster.methods import MEAN, SIMPLE, fit_method, mean_of

# Where methods are fitted again, so that what follows is forecast by one that has not seen it.
_CUTS = 3
# Rows before the first of them, at least.
_FEWEST_ROWS = 7
# Numbers of a method's errors at most, and origins whatever those are.
_MOST_NUMBERS, _FEWEST_ORIGINS = 1 << 22, 8


@dataclass(frozen=True)
class HeldOut:
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


def fit_methods(names: list[str], history: History, horizon: int) -> dict[str, Fitted]:
    """Fit methods, those that the mean is of once; without those that have too few rows."""
    own = [one for one in names if one != MEAN]
    wanted = [*own, *(one for one in SIMPLE if MEAN in names and one not in own)]
    found = {name: fit_method(name, history, horizon) for name in wanted}
    if MEAN in names:
        found[MEAN] = mean_of([one for name in SIMPLE if (one := found[name]) is not None])
    return {name: one for name in names if (one := found.get(name)) is not None}


def held_out_errors(
    history: History, horizon: int, names: list[str], share: float = 0.5, cuts: int = _CUTS
) -> HeldOut:
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
        return HeldOut(origins, 0.0, {})
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
    return HeldOut(origins, (steps - first) / horizon, whole)


def repeated_errors(history: History, origins: np.ndarray, horizon: int) -> np.ndarray:
    """Return the errors [n, H, D] of repeating the last season before each of ``origins`` [n].

    A season that is longer than what comes before the first of them counts as none.
    """
    steps, variables = history.values.shape
    season = history.season if not len(origins) or history.season <= origins[0] else 1
    ahead = np.arange(horizon)
    after = np.concatenate([history.values, np.full((horizon, variables), np.nan)])
    before = history.filled[np.minimum(origins[:, None] - season + ahead % season, steps - 1)]
    return after[origins[:, None] + ahead] - before
