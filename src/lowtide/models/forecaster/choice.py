"""The choice of a method, by CRPS on what it was not fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lowtide.core.errors import InputError
from lowtide.models.forecaster.bands import crps, error_scale
from lowtide.models.forecaster.chosen import ChosenForecaster
from lowtide.models.forecaster.forecaster import RidgeForecaster, independent_windows, require_size
from lowtide.models.forecaster.history import Fitted, History
from lowtide.models.forecaster.methods import (
    AUTO,
    DLINEAR,
    MEAN,
    MOST_ROWS,
    NAIVE,
    PLAIN,
    RIDGE,
    SIMPLE,
    left_out,
)
from lowtide.models.forecaster.paths import AUTO_PATHS, PathChoice
from lowtide.models.forecaster.rolling import fit_methods, held_out_errors

# A method takes the place of a simpler one that is worse by more than chance: by 70 % of its CRPS
# on one independent window, by 7 % on a hundred.
_MARGIN = 0.7
# Methods of a series on its own, the mean of simple ones first, and of long series that share one.
_SHORT, _LONG = (MEAN, *SIMPLE, PLAIN, RIDGE), (NAIVE, PLAIN, DLINEAR)
# Independent windows that the four ridges' own bands need; long series are judged on a quarter.
_FEWEST_WINDOWS, _JUDGED_SHARE = 4.0, 0.75


@dataclass(frozen=True)
class Choice:
    """A forecaster and how its methods were chosen.

    Attributes:
        forecaster: What was fitted to the whole history.
        chosen: Name of the method of each of the D variables.
        scores: CRPS [D] of each method on what it was not fitted to, by name; NaN without any.
        held_out: Number of forecasts that were judged.
        windows: How many of them do not overlap.
        notes: Sentences on methods that were left out.
    """

    forecaster: RidgeForecaster | ChosenForecaster
    chosen: tuple[str, ...]
    scores: dict[str, np.ndarray]
    held_out: int
    windows: float
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> PathChoice:
        """Sampler of joint paths."""
        return self.forecaster.paths


def fit_model(
    model: str,
    values: np.ndarray,
    phases: np.ndarray,
    *,
    horizon: int,
    season: int,
    paths: str = AUTO_PATHS,
) -> Choice:
    """Fit a method by its name, or ``"auto"`` for the best.

    Series of at most 2,000 rows have one each; longer ones share one, which is the four ridges
    unless another is better beyond chance.

    Args:
        model: A name in `METHODS`, or ``"auto"``.
        values: Series [T, D] in its own units, NaN where a value is missing; every variable has one
            at least.
        phases: Phase [T] of each step in its season, from 0.
        horizon: Steps ahead.
        season: Steps of a season; 1 for none.
        paths: A name in `PATHS`, or ``"auto"``.

    Raises:
        InputError: The history has too few rows for the ``model``, or none can forecast so much.
    """
    require_size(horizon, values.shape[1])
    history = History(values, season)
    windows = independent_windows(len(values), horizon, season)
    able = windows >= _FEWEST_WINDOWS
    long = model == AUTO and len(values) > MOST_ROWS
    if not able or not (long or model == RIDGE):
        found = _choose(model, history, horizon, paths)
        if not able or set(found.chosen) != {RIDGE}:
            return found
        scores, notes = found.scores, found.notes
    else:
        scores, notes = {}, ()
    ridge = RidgeForecaster.fit(values, phases, horizon=horizon, season=season, paths=paths)
    if long:
        held = held_out_errors(history, horizon, list(_LONG), _JUDGED_SHARE, 1)
        scores = {name: _score(errors) for name, errors in held.errors.items()}
        scores[RIDGE], notes = ridge.fold_crps, _reasons(history)
        best = _best_for_all(scores, held.windows)
        if best != RIDGE:
            return replace(_choose(best, history, horizon, paths), scores=scores, notes=notes)
    chosen = (RIDGE,) * values.shape[1]
    return Choice(ridge, chosen, scores, len(ridge.origins), windows, notes)


def _choose(model: str, history: History, horizon: int, paths: str) -> Choice:
    """Fit methods, choose one for each variable and make its bands."""
    names = list(_SHORT) if model == AUTO else [model]
    fitted = fit_methods(names, history, horizon)
    if not fitted:
        steps = len(history.values)
        why = left_out(model, history) or f"{steps:,} rows are too few"
        raise InputError(f"{model} cannot forecast {horizon:,} steps: {why}", hint="--model auto")
    held = held_out_errors(history, horizon, list(fitted))
    none = np.empty((0, horizon, history.values.shape[1]))
    scales, scores = {}, {}
    for name, one in fitted.items():
        errors = held.errors.get(name, none)
        scales[name] = error_scale(errors, one.deviation, one.growth)
        scores[name] = crps(errors, scales[name])
    chosen = _best_for_each(fitted, scores, held.windows)
    return Choice(
        forecaster=ChosenForecaster.build(chosen, fitted, scales, held, paths),
        chosen=chosen,
        scores=scores,
        held_out=len(held.origins),
        windows=held.windows,
        notes=_reasons(history) if model == AUTO else (),
    )


def _best_for_each(
    fitted: dict[str, Fitted], scores: dict[str, np.ndarray], windows: float
) -> tuple[str, ...]:
    """Return the method of each variable: the simplest that no other beats by more than chance."""
    able = {name: np.isfinite(one.deviation) for name, one in fitted.items()}
    first = next(iter(fitted))
    chosen = np.where(able[first], first, NAIVE if NAIVE in fitted else first)
    least = np.where(able[first], scores[first], scores.get(NAIVE, scores[first]))
    for name, score in scores.items():
        better = able[name] & (score < _margin(windows) * least)
        chosen, least = np.where(better, name, chosen), np.where(better, score, least)
    return tuple(chosen.tolist())


def _best_for_all(scores: dict[str, np.ndarray], windows: float) -> str:
    """Return the method that is best for all variables: the ridges if none beats them clearly."""
    ridge = np.where(scores[RIDGE] > 0, scores[RIDGE], 1.0)
    shares = {name: float(np.nanmean(score / ridge)) for name, score in scores.items()}
    best = min(shares, key=shares.__getitem__)
    return best if shares[best] < _margin(windows) else RIDGE


def _margin(windows: float) -> float:
    return max(0.0, 1 - _MARGIN / math.sqrt(max(windows, 1e-9)))


def _score(errors: np.ndarray) -> np.ndarray:
    """Return the CRPS [D] of errors [n, H, D] with bands of their own size."""
    return crps(errors, np.sqrt(np.nanmean(np.square(errors), axis=0)))


def _reasons(history: History) -> tuple[str, ...]:
    found = [(name, left_out(name, history)) for name in SIMPLE]
    return tuple(f"{name} is left out: {reason}" for name, reason in found if reason)
