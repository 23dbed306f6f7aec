"""Closed-form forecaster: the mean of four ridges, a conditional scale, joint residual paths.

Its file holds all of its arrays (.npz).
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder
from lowtide.core.errors import InputError, ModelError
from lowtide.core.input_file import require_input
from lowtide.models.forecaster.bands import (
    ErrorStdEstimator,
    crps,
    standardized_errors,
    volatility_features,
)
from lowtide.models.forecaster.paths import (
    AUTO_PATHS,
    PATHS,
    ForecastDistribution,
    PathChoice,
    StandardScaler,
    choose_paths,
    fill_residuals,
)
from lowtide.models.forecaster.ridge import (
    FOLDS,
    LOOK_BACKS,
    RidgeConfig,
    RidgeFit,
    fit_ridge,
    held_out_means,
    ridge_configs,
    ridge_forecasts,
)
from lowtide.models.forecaster.windows import (
    few_errors,
    forward_fill,
    numbered_chunks,
    target_windows,
)

# Held-out residual paths that scales are fitted to and samples are drawn from, and numbers in them:
# of wide tables and long horizons fewer are kept.
_MOST_PATHS, _MOST_NUMBERS = 2048, 1 << 25
_FEWEST_PATHS = 8
# Steps ahead of all variables: of more, too few residual paths would be left.
_LARGEST_PATH = 1 << 20
# Numbers that are forecast at once where only their errors are wanted.
_PART_NUMBERS = 1 << 23
# Phases that a season of time has at most: a short history may lack those that are to be forecast.
_PHASES = 24

_SCALE = ("table", "center", "low", "high", "slopes")
_WHOLE = ("horizon", "recent", "block")


@dataclass(frozen=True)
class RidgeForecaster:
    """Probabilistic forecaster of all variables of a series, fitted in closed form.

    The center is the mean of four ridges: look-backs of 336 and 512 steps (fewer where the series
    is short), each plain and weighted. Errors are those of blocked folds, in which each window is
    forecast by ridges that saw none of its targets. Their scale depends on what is known at the
    origin; what is left of them, standardized, are the residual paths that samples are drawn from.

    Fitting takes about 60 bytes of memory for each of the n x H x D residuals, beside copies of the
    series. There are at most 2,048 residual paths and 2**25 residuals, which are 2 GiB: of 10,000
    variables by 24 steps 139 paths. Above H x D of 2**20, where fewer than 32 are left, it refuses.

    Attributes:
        horizon: Steps ahead, H.
        scaler: Standardizes a series in its own units.
        ridges: Matrix [L, H] of each ridge.
        penalties: Penalty chosen for each ridge, per window.
        scale: Scale of the errors.
        residuals: Standardized held-out errors [n, H, D], float32.
        origins: Forecast origins [n] of the residuals, ascending.
        paths: Sampler of joint paths made from the residuals, and how it was chosen.
        recent: Steps that volatility is measured over.
        block: Steps of a forecast that are verified, as one, against what came.
        unverified: Mask [D] of variables that have a step with few held-out errors; those of others
            stand for it.
        fold_crps: CRPS [D] of Gaussian bands on the last fold, in the series' own units; NaN where
            that is not known.
    """

    horizon: int
    scaler: StandardScaler
    ridges: tuple[np.ndarray, ...]
    penalties: tuple[float, ...]
    scale: ErrorStdEstimator
    residuals: np.ndarray
    origins: np.ndarray
    paths: PathChoice
    recent: int
    block: int
    unverified: np.ndarray
    fold_crps: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))

    @property
    def context(self) -> int:
        """Steps before an origin that its forecast depends on."""
        return max(len(matrix) for matrix in self.ridges) + self.recent + self.block

    @classmethod
    def fit(
        cls,
        values: np.ndarray,
        phases: np.ndarray,
        *,
        horizon: int,
        season: int,
        paths: str = AUTO_PATHS,
    ) -> RidgeForecaster:
        """Fit to a series.

        Args:
            values: Series [T, D] in its own units, NaN where a value is missing; every variable has
                one at least.
            phases: Phase [T] of each step in its season, from 0.
            horizon: Steps ahead.
            season: Steps of a season; 1 for none.
            paths: A name in `PATHS`, or ``"auto"`` for the one that is best on blocked folds.

        Raises:
            InputError: The series is too short for the horizon, or horizon times variables is more
                than 1,048,576.
        """
        largest = require_size(horizon, values.shape[1])
        scaler, steps = StandardScaler.fit(values), len(values)
        known, standardized = np.isfinite(values), forward_fill(scaler.transform(values))
        configs = ridge_configs(steps, horizon, season)
        block, recent, first = _beginning(configs, steps, horizon, season)
        origins = np.arange(first, steps - horizon + 1)
        if len(origins) < _FEWEST_PATHS:
            raise InputError(
                f"{steps:,} steps are too few for a horizon of {horizon:,}",
                hint="forecast fewer steps, or give a longer history",
            )
        origins = origins[
            :: _stride(len(origins), season, min(_MOST_PATHS, _MOST_NUMBERS // largest))
        ]
        fits = [fit_ridge(standardized, known, config, horizon) for config in configs]
        verified = _verified_errors(standardized, known, fits, block)
        seen = target_windows(known, origins, horizon)
        errors = target_windows(standardized, origins, horizon) - held_out_means(
            standardized, origins, fits
        )
        errors[~seen] = np.nan
        judged = seen.sum(axis=0)
        if not judged.sum(axis=1).all():
            raise InputError(
                f"the series have too few values for a horizon of {horizon:,}: none"
                f" {int(judged.sum(axis=1).argmin()) + 1:,} steps after a look-back",
                hint="forecast fewer steps, or give a longer history",
            )
        features = volatility_features(standardized, verified, origins, recent)
        ahead = phases[origins[:, None] + np.arange(horizon)]
        scale = ErrorStdEstimator.fit(errors, ahead, features, max(_PHASES, int(phases.max()) + 1))
        scales = scale(ahead, features)
        residuals = (errors / scales).astype(np.float32)
        complete = _complete(residuals)
        residuals = fill_residuals(residuals[complete])
        windows = independent_windows(steps, horizon, season)
        residuals = standardized_errors(residuals, windows)
        late = origins >= steps - (steps - first) // FOLDS
        return cls(
            horizon=horizon,
            scaler=scaler,
            ridges=tuple(one.matrix for one in fits),
            penalties=tuple(one.penalty for one in fits),
            scale=scale,
            residuals=residuals,
            unverified=few_errors(judged).sum(axis=0) > 0,
            origins=origins[complete],
            paths=choose_paths(paths, residuals, scales[complete], origins[complete]),
            recent=recent,
            block=block,
            fold_crps=crps(errors[late], scales[late]) * scaler.deviation,
        )

    def predict(
        self, values: np.ndarray, origins: np.ndarray, phases: np.ndarray
    ) -> ForecastDistribution:
        """Return the distributions of what follows ``origins``.

        A forecast is bit-identical whatever others are computed with it, and nothing that follows
        its origin is read.

        Args:
            values: Series [T, D] in its own units.
            origins: Forecast origins [n], ascending, each at least `context`.
            phases: Phase [n, H] of each target in its season.
        """
        first = int(origins[0]) - self.context
        values, origins = values[first : int(origins[-1])], origins - first
        known, values = np.isfinite(values), forward_fill(self.scaler.transform(values))
        # Forecasts whose first steps are past by now tell how large errors are these days.
        earlier = np.unique((origins[:, None] - self.block - np.arange(self.recent)).ravel())
        matrices = [matrix[:, : self.block] for matrix in self.ridges]
        ahead = _mean_forecast(values, earlier, matrices)
        verified = np.zeros_like(values)
        verified[earlier + self.block - 1] = _mean_errors(values, known, earlier, ahead)
        features = volatility_features(values, verified, origins, self.recent)
        mean = _mean_forecast(values, origins, list(self.ridges))
        scale = self.scale(phases, features) * self.scaler.deviation
        return ForecastDistribution(origins + first, self.scaler.inverse(mean), scale)

    def sample(self, distribution: ForecastDistribution, samples: int, *, seed: int) -> np.ndarray:
        """Return sample paths [n, samples, H, D] in the series' own units.

        Args:
            distribution: Forecasts of this model.
            samples: Paths of each window.
            seed: Seed, at least 0; with it, a window's paths depend on its origin alone.
        """
        return distribution.sample(self.paths.sampler, samples, seed=seed)


def require_size(horizon: int, variables: int) -> int:
    """Return how many values a path has; raises `InputError` if those are too many."""
    largest = horizon * variables
    if largest > _LARGEST_PATH:
        raise InputError(
            f"{horizon:,} steps of {variables:,} series are {largest:,} values to forecast at once,"
            f" of at most {_LARGEST_PATH:,}",
            hint="choose fewer series by --columns, or forecast fewer steps",
        )
    return largest


def independent_windows(steps: int, horizon: int, season: int) -> float:
    """Return how many held-out windows of a series of ``steps`` do not overlap; 0 without any."""
    first = _beginning(ridge_configs(steps, horizon, season), steps, horizon, season)[2]
    return max(0, steps - horizon + 1 - first) / horizon


def _beginning(
    configs: list[RidgeConfig], steps: int, horizon: int, season: int
) -> tuple[int, int, int]:
    """Return the steps verified as one, those of recent volatility, and the first origin."""
    longest, block = configs[-1].look_back, min(season, horizon)
    recent = min(max(7 * season, 14), LOOK_BACKS[0], max(1, (steps - longest) // 8))
    return block, recent, longest + recent + block


def _stride(count: int, season: int, most: int) -> int:
    """Return the distance of origins of which at most ``most`` stand for ``count``.

    It has no factor in common with the season, so that they start at every phase of one.
    """
    stride = -(-count // most)
    while stride > 1 and math.gcd(stride, season) > 1:
        stride += 1
    return stride


def _verified_errors(
    values: np.ndarray, known: np.ndarray, fits: list[RidgeFit], block: int
) -> np.ndarray:
    """Return errors [T, D] of held-out forecasts, each at the last of the ``block`` steps it is of.

    Before the first forecast they are those of the first.
    """
    longest = max(fit.config.look_back for fit in fits)
    origins = np.arange(longest, len(values) - block + 1)
    verified = np.empty_like(values)
    for _, part in numbered_chunks(origins, block * values.shape[1], _PART_NUMBERS):
        ahead = held_out_means(values, part, fits, block)
        verified[part + block - 1] = _mean_errors(values, known, part, ahead)
    verified[: longest + block - 1] = verified[longest + block - 1]
    return verified


def _mean_forecast(values: np.ndarray, origins: np.ndarray, ridges: list[np.ndarray]) -> np.ndarray:
    """Return the mean [n, H, D] of the forecasts of several ridges."""
    total = ridge_forecasts(values, origins, ridges[0])
    for matrix in ridges[1:]:  # one by one: a wide table's forecasts are large
        total += ridge_forecasts(values, origins, matrix)
    total /= len(ridges)
    return total


def _mean_errors(
    values: np.ndarray, known: np.ndarray, origins: np.ndarray, ahead: np.ndarray
) -> np.ndarray:
    """Return mean absolute errors [n, D] of forecasts ``ahead`` [n, H, D]; 0 without a target."""
    horizon = ahead.shape[1]
    seen = target_windows(known, origins, horizon)
    errors = np.where(seen, np.abs(target_windows(values, origins, horizon) - ahead), 0.0)
    return errors.sum(axis=1) / np.maximum(seen.sum(axis=1), 1)


def _complete(residuals: np.ndarray) -> np.ndarray:
    """Return which of the paths [n, H, D] have no missing target; all if those are not most."""
    complete = np.asarray(np.isfinite(residuals).all(axis=(1, 2)))
    few = complete.sum() < max(_FEWEST_PATHS, len(complete) / 2)
    return np.ones(len(residuals), bool) if few else complete


def save_forecaster(path: Path, model: RidgeForecaster) -> None:
    """Write all arrays of a forecaster; raises `OutputError`."""
    arrays: dict[str, np.ndarray] = {
        "mean": model.scaler.mean,
        "deviation": model.scaler.deviation,
        "penalties": np.array(model.penalties),
        "residuals": model.residuals,
        "origins": model.origins,
        "unverified": model.unverified,
        "paths": np.array(model.paths.name),
        "energy_names": np.array(list(model.paths.energy), "U"),
        "energy": np.array(list(model.paths.energy.values()), float),
    }
    arrays |= {name: np.array(getattr(model, name)) for name in _WHOLE}
    arrays |= {f"scale_{name}": getattr(model.scale, name) for name in _SCALE}
    arrays |= {f"ridge_{number}": matrix for number, matrix in enumerate(model.ridges)}
    make_folder(path.parent)
    with atomic_output(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def load_forecaster(path: Path) -> RidgeForecaster:
    """Read a forecaster; raises `ModelError` for a file that is damaged or of another kind."""
    require_input(path, ModelError, hint="train it again: lowtide train forecast")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _forecaster(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{path} is no file of a forecaster, or is damaged: {error}",
            hint="train it again: lowtide train forecast",
        ) from error


def _forecaster(arrays: dict[str, np.ndarray]) -> RidgeForecaster:
    name, residuals = str(arrays["paths"]), arrays["residuals"]
    energy = dict(zip(arrays["energy_names"].tolist(), arrays["energy"].tolist(), strict=True))
    horizon, recent, block = (int(arrays[one]) for one in _WHOLE)
    penalties = tuple(arrays["penalties"].tolist())
    return RidgeForecaster(
        horizon=horizon,
        scaler=StandardScaler(arrays["mean"], arrays["deviation"]),
        ridges=tuple(arrays[f"ridge_{number}"] for number in range(len(penalties))),
        penalties=penalties,
        scale=ErrorStdEstimator(*(arrays[f"scale_{one}"] for one in _SCALE)),
        residuals=residuals,
        origins=arrays["origins"],
        paths=PathChoice(name, PATHS[name](residuals), energy),
        recent=recent,
        block=block,
        unverified=arrays["unverified"],
    )
