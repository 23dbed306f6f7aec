"""The choice of a method by CRPS on what it was not fitted to, and the forecaster that has it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lowtide.core.errors import InputError
from lowtide.models.forecaster.bands import (
    ENOUGH_WINDOWS,
    crps,
    error_scale,
    share_held,
    standardized_errors,
    student_paths,
)
from lowtide.models.forecaster.forecaster import RidgeForecaster, independent_windows, require_size
from lowtide.models.forecaster.methods import (
    AUTO,
    DLINEAR,
    MEAN,
    MOST_ROWS,
    NAIVE,
    PLAIN,
    RIDGE,
    SIMPLE,
    HeldOutErrors,
    fit_methods,
    held_out_errors,
    reason_left_out,
    repeated_errors,
)
from lowtide.models.forecaster.paths import (
    AUTO_PATHS,
    PATHS,
    ForecastDistribution,
    PathChoice,
    choose_paths,
    fill_residuals,
)
from lowtide.models.forecaster.windows import FittedMethod, SeriesHistory, forward_fill

# A method takes the place of a simpler one only if it is better by more than chance on n windows
# that do not overlap: by 1.4 n^-0.8, which is all of it on one and 22 % on ten; from 20 windows on
# by half of that, 6 % there and 2 % on a hundred.
_CHANCE, _POWER = 1.4, 0.8
# Methods of a series on its own, the mean of simple ones first, and of long series that share one.
_SHORT, _LONG = (MEAN, *SIMPLE, PLAIN, RIDGE), (NAIVE, PLAIN, DLINEAR)
# Independent windows that the four ridges' own bands need; long series are judged on a quarter.
_FEWEST_WINDOWS, _JUDGED_SHARE = 4.0, 0.75

_MOST_PATHS, _FEWEST_JUDGED, _USUAL_PATHS = 2048, 8, "bootstrap"


@dataclass(frozen=True)
class ForecasterChoice:
    """A forecaster and how its methods were chosen.

    Attributes:
        forecaster: What was fitted to the whole history.
        chosen: Name of the method of each of the D variables.
        scores: CRPS [D] of each method on what it was not fitted to, by name; NaN without any.
        held_out: Number of forecasts that were judged.
        windows: How many of them do not overlap.
        repeating: CRPS [D] of repeating the last season there; NaN where it is not known.
        notes: Sentences on methods that were left out.
        held: Share [D] of the later held-out errors inside of 95 % bands made of the earlier ones;
            NaN where it is not known.
    """

    forecaster: RidgeForecaster | PerVariableForecaster
    chosen: tuple[str, ...]
    scores: dict[str, np.ndarray]
    held_out: int
    windows: float
    repeating: np.ndarray
    notes: tuple[str, ...] = ()
    held: np.ndarray | None = None

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
) -> ForecasterChoice:
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
    history = SeriesHistory(values, season)
    windows = independent_windows(len(values), horizon, season)
    able = windows >= _FEWEST_WINDOWS
    long = model == AUTO and len(values) > MOST_ROWS
    if not able or not (long or model == RIDGE):
        found = _choose(model, history, horizon, paths)
        if not able or set(found.chosen) != {RIDGE}:
            return found
        scores, repeating, notes = found.scores, found.repeating, found.notes
    else:
        scores, repeating, notes = {}, np.full(values.shape[1], np.nan), ()
    ridge = RidgeForecaster.fit(values, phases, horizon=horizon, season=season, paths=paths)
    if long:
        held = held_out_errors(history, horizon, list(_LONG), _JUDGED_SHARE, 1)
        scores = {name: _score(errors) for name, errors in held.errors.items()}
        repeating = _score(repeated_errors(history, held.origins, horizon))
        scores[RIDGE], notes = ridge.fold_crps, _reasons(history)
        best = _best_for_all(RIDGE, scores, held.windows)
        if best != RIDGE:
            found = _choose(best, history, horizon, paths)
            return replace(found, scores=scores, repeating=repeating, notes=notes)
    chosen = (RIDGE,) * values.shape[1]
    return ForecasterChoice(ridge, chosen, scores, len(ridge.origins), windows, repeating, notes)


def _choose(model: str, history: SeriesHistory, horizon: int, paths: str) -> ForecasterChoice:
    """Fit methods, choose one for each variable and make its bands."""
    names = list(_SHORT) if model == AUTO else [model]
    fitted = fit_methods(names, history, horizon)
    if not fitted:
        steps = len(history.values)
        why = reason_left_out(model, history) or f"{steps:,} rows are too few"
        raise InputError(f"{model} cannot forecast {horizon:,} steps: {why}", hint="--model auto")
    held = held_out_errors(history, horizon, list(fitted))
    none = np.empty((0, horizon, history.values.shape[1]))
    scales, scores = {}, {}
    for name, one in fitted.items():
        errors = held.errors.get(name, none)
        scales[name] = error_scale(errors, one.deviation, one.growth)
        scores[name] = crps(errors, scales[name])
    chosen = _best_for_each(fitted, scores, _windows_of_each(held, len(history.first)))
    shares = {
        name: share_held(held.errors.get(name, none), fitted[name].deviation, fitted[name].growth)
        for name in set(chosen)
    }
    return ForecasterChoice(
        forecaster=PerVariableForecaster.build(chosen, fitted, scales, held, paths),
        chosen=chosen,
        scores=scores,
        held_out=len(held.origins),
        windows=held.windows,
        repeating=_score(repeated_errors(history, held.origins, horizon)),
        notes=_reasons(history) if model == AUTO else (),
        held=np.array([shares[name][one] for one, name in enumerate(chosen)]),
    )


def _best_for_each(
    fitted: dict[str, FittedMethod], scores: dict[str, np.ndarray], windows: np.ndarray
) -> tuple[str, ...]:
    """Return the method of each variable: the simplest that no other beats by more than chance.

    ``windows`` [D] are those of each that do not overlap. What is best for all of them together is
    the first that others have to beat.
    """
    able = {name: np.isfinite(one.deviation) for name, one in fitted.items()}
    first = _best_for_all(next(iter(fitted)), scores, float(windows.mean()))
    spare = NAIVE if NAIVE in fitted else first
    chosen = np.where(able[first], first, spare)
    least = np.where(able[first], scores[first], scores[spare])
    for name, score in scores.items():
        better = able[name] & (score < _margin(windows) * least)
        chosen, least = np.where(better, name, chosen), np.where(better, score, least)
    return tuple(chosen.tolist())


def _best_for_all(first: str, scores: dict[str, np.ndarray], windows: float) -> str:
    """Return the method that is best for all variables: ``first`` if none beats it clearly."""
    usual = np.where(scores[first] > 0, scores[first], np.nan)
    shares = {}
    for name, score in scores.items():
        known = np.isfinite(score / usual)
        # One that some variables have no score of is for these alone.
        whole = known.sum() == np.isfinite(usual).sum() > 0
        shares[name] = float((score / usual)[known].mean()) if whole else math.inf
    best = min(shares, key=shares.__getitem__)
    # Variables do not err independently: a hundred of them tell as much as ten that did.
    enough = windows * math.sqrt(len(usual))
    return best if shares[best] < _margin(enough) else first


def _windows_of_each(held: HeldOutErrors, variables: int) -> np.ndarray:
    """Return how many windows of each variable [D] do not overlap: fewer where it begins late."""
    if not held.errors:
        return np.zeros(variables)
    shares = [np.isfinite(errors[:, 0]).mean(axis=0) for errors in held.errors.values()]
    return held.windows * np.max(shares, axis=0)


def _margin(windows: np.ndarray | float) -> np.ndarray:
    chance = _CHANCE * np.maximum(windows, 1.0) ** -_POWER
    return np.maximum(0.0, 1 - np.where(windows < ENOUGH_WINDOWS, chance, chance / 2))


def _score(errors: np.ndarray) -> np.ndarray:
    """Return the CRPS [D] of errors [n, H, D] with bands of their own size."""
    seen = np.isfinite(errors)
    squares = np.where(seen, np.square(errors), 0.0).sum(axis=0)
    scale = np.sqrt(squares / np.maximum(seen.sum(axis=0), 1))
    return crps(errors, np.maximum(scale, np.finfo(float).tiny))


def _reasons(history: SeriesHistory) -> tuple[str, ...]:
    found = [(name, reason_left_out(name, history)) for name in SIMPLE]
    return tuple(f"{name} is left out: {reason}" for name, reason in found if reason)


@dataclass(frozen=True)
class PerVariableForecaster:
    """Probabilistic forecaster that has a method of its own for each variable.

    Attributes:
        horizon: Steps ahead, H.
        chosen: Name of the method of each of the D variables.
        fitted: What was fitted to the whole history, by name.
        scale: Scale of errors [H, D].
        paths: Sampler of joint paths of errors in units of the scale.
        residuals: The paths [n, H, D] that it is made from.
        unverified: Mask [D] of variables that have fewer held-out errors than others.
    """

    horizon: int
    chosen: tuple[str, ...]
    fitted: dict[str, FittedMethod]
    scale: np.ndarray
    paths: PathChoice
    residuals: np.ndarray
    unverified: np.ndarray

    @classmethod
    def build(
        cls,
        chosen: tuple[str, ...],
        fitted: dict[str, FittedMethod],
        scales: dict[str, np.ndarray],
        held: HeldOutErrors,
        paths: str,
    ) -> PerVariableForecaster:
        """Put together what was ``chosen`` for each variable.

        Args:
            chosen: Name of the method of each of the D variables.
            fitted: What was fitted to the whole history, by name.
            scales: Scale of errors [H, D] of each method.
            held: Errors of each method on what it was not fitted to.
            paths: A name in `PATHS`, or ``"auto"``.
        """
        shape = scales[chosen[0]].shape
        scale, growth = np.empty(shape), np.empty(shape)
        errors = np.full((len(held.origins), *shape), np.nan)
        for name in set(chosen):
            own = np.array(chosen) == name
            scale[:, own], growth[:, own] = scales[name][:, own], fitted[name].growth[:, own]
            if name in held.errors:
                errors[..., own] = held.errors[name][..., own]
        known = np.isfinite(scale).all(axis=0)
        others = scale[:, known].mean(axis=1) if known.any() else np.ones(len(scale))
        scale = np.where(known, scale, others[:, None])
        judged = np.isfinite(errors).sum(axis=(0, 1))
        unverified = ~known | (judged < np.minimum(_FEWEST_JUDGED, judged.max()))
        used = {name: fitted[name] for name in sorted(set(chosen))}
        residuals, choice = _paths(paths, errors, scale, growth, held)
        return cls(shape[0], chosen, used, scale, choice, residuals, unverified)

    def predict(
        self, values: np.ndarray, origins: np.ndarray, phases: np.ndarray
    ) -> ForecastDistribution:
        """Return the distributions of what follows ``origins``.

        Args:
            values: Series [T, D] in its own units, NaN where a value is missing.
            origins: Forecast origins [n], ascending.
            phases: Phase of each target in its season, which no method here needs.
        """
        filled = forward_fill(values)
        mean = np.empty((len(origins), *self.scale.shape))
        for name, one in self.fitted.items():
            own = np.array(self.chosen) == name
            mean[..., own] = one.predict(filled, origins)[..., own]
        return ForecastDistribution(origins, mean, np.broadcast_to(self.scale, mean.shape))


def _paths(
    name: str, errors: np.ndarray, scale: np.ndarray, growth: np.ndarray, held: HeldOutErrors
) -> tuple[np.ndarray, PathChoice]:
    """Return paths and their sampler: errors that occurred if they are enough, else made ones."""
    if held.windows < ENOUGH_WINDOWS:
        growth = np.where(np.isfinite(growth), growth, 1.0)
        residuals = student_paths(errors[:, 0], growth, held.windows)
        name = _USUAL_PATHS if name == AUTO_PATHS else name
        return residuals, PathChoice(name, PATHS[name](residuals))
    # Windows that all targets are known of.
    whole = np.flatnonzero(held.origins <= held.origins[-1] + 1 - len(scale))
    whole = whole[:: -(-len(whole) // _MOST_PATHS)]
    residuals = fill_residuals(errors[whole] / scale).astype(float)
    residuals = standardized_errors(residuals, held.windows)
    scales = np.broadcast_to(scale, residuals.shape)
    return residuals, choose_paths(name, residuals, scales, held.origins[whole])
