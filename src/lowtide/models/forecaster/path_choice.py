"""Choice of the sampler of joint paths, by energy score on blocked folds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lowtide.models.forecaster.paths import PATHS, PathSampler

AUTO_PATHS = "auto"
# What is taken where there are too few residual paths to judge by.
_USUAL = "bootstrap"
_FOLDS, _FEWEST_OUTSIDE = 4, 32
_JUDGED_WINDOWS, _JUDGED_SAMPLES = 64, 100
# Steps of all variables in the windows of a fold: of thousands of variables few windows are judged,
# whose scores are means over many numbers.
_JUDGED_NUMBERS, _FEWEST_JUDGED = 1 << 19, 4


@dataclass(frozen=True)
class PathChoice:
    """A sampler of joint paths.

    Attributes:
        name: Its name in `PATHS`.
        sampler: The sampler, made from all residuals.
        energy: Mean energy score of each sampler that was tried, of standardized values; empty
            where the name was given or there was too little to judge by.
    """

    name: str
    sampler: PathSampler
    energy: dict[str, float] = field(default_factory=dict)


def choose_paths(
    name: str, residuals: np.ndarray, scales: np.ndarray, origins: np.ndarray
) -> PathChoice:
    """Return the sampler called ``name``; of ``"auto"``, the one of the least energy score.

    Every sampler is judged on each of four stretches of windows, made from the others whose targets
    are outside the targets of the stretch.

    Args:
        name: A name in `PATHS`, or ``"auto"``.
        residuals: Standardized held-out residuals [n, H, D].
        scales: Scales [n, H, D] of the residuals.
        origins: Forecast origins [n], ascending.
    """
    if name != AUTO_PATHS:
        return PathChoice(name, PATHS[name](residuals))
    scores: dict[str, list[float]] = {one: [] for one in PATHS}
    judged = min(_JUDGED_WINDOWS, max(_FEWEST_JUDGED, _JUDGED_NUMBERS // residuals[0].size))
    for inside, outside in _folds(origins, residuals.shape[1], judged):
        for one, kind in PATHS.items():
            scores[one] += _scores(kind(residuals[outside]), inside, residuals, scales)
    energy = {one: float(np.mean(found)) for one, found in scores.items() if found}
    best = min(energy, key=energy.__getitem__, default=_USUAL)
    return PathChoice(best, PATHS[best](residuals), energy)


def _folds(origins: np.ndarray, horizon: int, judged: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return at most ``judged`` rows, and those that samplers are made from, of each fold."""
    folds = []
    for rows in np.array_split(np.arange(len(origins)), _FOLDS):
        first, last = origins[rows[0]], origins[rows[-1]]
        outside = np.flatnonzero((origins <= first - horizon) | (origins >= last + horizon))
        if len(outside) >= _FEWEST_OUTSIDE:
            folds.append((rows[:: -(-len(rows) // judged)], outside))
    return folds


def _scores(
    sampler: PathSampler, rows: np.ndarray, residuals: np.ndarray, scales: np.ndarray
) -> list[float]:
    paths = np.empty((_JUDGED_SAMPLES, *residuals.shape[1:]))
    scores = []
    for row in rows.tolist():
        sampler.sample(row, paths, seed=0)
        scores.append(energy_score(scales[row] * residuals[row], scales[row] * paths))
    return scores


def energy_score(truth: np.ndarray, samples: np.ndarray) -> float:
    """Return the fair energy score of ``samples`` [S, H, D] for one window's ``truth`` [H, D].

    It is the mean distance to the truth less half the mean distance of two samples (Gneiting and
    Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", 2007), in memory of S * S.
    Missing targets do not count; NaN where there is none.
    """
    seen = np.isfinite(truth)
    if not seen.any():
        return float("nan")
    # Distances are of vectors less the truth, whose products lose no digits to its level.
    errors = (samples - truth)[:, seen]
    products = errors @ errors.T
    squares = np.diagonal(products)
    between = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0))
    np.fill_diagonal(between, 0.0)
    pairs = len(errors) * (len(errors) - 1)
    return float(np.sqrt(squares).mean() - between.sum() / (2 * pairs))
