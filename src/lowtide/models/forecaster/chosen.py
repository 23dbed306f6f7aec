"""A forecaster that has a method of its own for each series, and bands of their errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.bands import ENOUGH_WINDOWS, made_paths, occurred
from lowtide.models.forecaster.history import Fitted
from lowtide.models.forecaster.paths import (
    AUTO_PATHS,
    PATHS,
    Distribution,
    PathChoice,
    choose_paths,
    fill_residuals,
)
from lowtide.models.forecaster.rolling import HeldOut
from lowtide.models.forecaster.windows import forward_fill

_MOST_PATHS, _FEWEST_JUDGED, _USUAL_PATHS = 2048, 8, "bootstrap"


@dataclass(frozen=True)
class ChosenForecaster:
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
    fitted: dict[str, Fitted]
    scale: np.ndarray
    paths: PathChoice
    residuals: np.ndarray
    unverified: np.ndarray

    @classmethod
    def build(
        cls,
        chosen: tuple[str, ...],
        fitted: dict[str, Fitted],
        scales: dict[str, np.ndarray],
        held: HeldOut,
        paths: str,
    ) -> ChosenForecaster:
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

    def predict(self, values: np.ndarray, origins: np.ndarray, phases: np.ndarray) -> Distribution:
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
        return Distribution(origins, mean, np.broadcast_to(self.scale, mean.shape))


def _paths(
    name: str, errors: np.ndarray, scale: np.ndarray, growth: np.ndarray, held: HeldOut
) -> tuple[np.ndarray, PathChoice]:
    """Return paths and their sampler: errors that occurred if they are enough, else made ones."""
    if held.windows < ENOUGH_WINDOWS:
        growth = np.where(np.isfinite(growth), growth, 1.0)
        residuals = made_paths(errors[:, 0], growth, held.windows)
        name = _USUAL_PATHS if name == AUTO_PATHS else name
        return residuals, PathChoice(name, PATHS[name](residuals))
    # Windows that all targets are known of.
    whole = np.flatnonzero(held.origins <= held.origins[-1] + 1 - len(scale))
    whole = whole[:: -(-len(whole) // _MOST_PATHS)]
    residuals = fill_residuals(errors[whole] / scale).astype(float)
    residuals = occurred(residuals, held.windows)
    scales = np.broadcast_to(scale, residuals.shape)
    return residuals, choose_paths(name, residuals, scales, held.origins[whole])
