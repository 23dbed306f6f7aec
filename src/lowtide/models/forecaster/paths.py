"""Joint sample paths of standardized residuals: bootstrap, Gaussian copula, independent.

A `ForecastDistribution` is what a forecaster says of windows: a mean and a scale, from which its
paths are made. Which sampler is best is told by its energy score on blocked folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Protocol

import numpy as np

from lowtide.core.philox import philox_generator
from lowtide.models.forecaster.windows import few_errors, forward_fill

# Samples that are drawn at once, so that memory does not grow with their number.
_CHUNK = 16
# Common factors of a copula; normal scores that its table of quantiles goes to, and its rows.
_FACTORS, _LARGEST_SCORE, _SCORES = 256, 4.0, 513
_PURPOSE = 0x70617468  # "path", in the keys of generators
AUTO_PATHS = "auto"
# What is taken where there are too few residual paths to judge by.
_USUAL = "bootstrap"
_FOLDS, _FEWEST_OUTSIDE = 4, 32
_JUDGED_WINDOWS, _JUDGED_SAMPLES = 64, 100
# Steps of all variables in the windows of a fold: of thousands of variables few windows are judged,
# whose scores are means over many numbers.
_JUDGED_NUMBERS, _FEWEST_JUDGED = 1 << 19, 4


class PathSampler(Protocol):
    """Sampler of standardized residual paths of all variables of a window, jointly.

    A window's samples depend on the seed and its origin alone, not on other windows, and beyond
    ``paths`` memory does not grow with their number.
    """

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``; both integers are at least 0."""
        ...


class BootstrapPathSampler:
    """Residual paths that occurred, drawn whole: all steps and variables of one window at once.

    They are drawn without repetition while there are enough.

    Args:
        residuals: Standardized held-out residuals [n, H, D].
    """

    def __init__(self, residuals: np.ndarray) -> None:
        self._residuals = residuals

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        count = len(self._residuals)
        for start in range(0, len(paths), count):
            order = philox_generator(seed, _PURPOSE, origin, start).permutation(count)
            for row in range(start, min(start + count, len(paths)), _CHUNK):
                part = paths[row : min(row + _CHUNK, start + count)]
                part[:] = self._residuals[order[row - start :][: len(part)]]


class IndependentPathSampler:
    """Residuals that occurred, each step and variable drawn on its own.

    Args:
        residuals: Standardized held-out residuals [n, H, D].
    """

    def __init__(self, residuals: np.ndarray) -> None:
        self._residuals = residuals

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        count, *shape = self._residuals.shape
        flat, place = self._residuals.reshape(count, -1), np.arange(math.prod(shape))
        for part, draw in drawn_chunks(paths, seed, _PURPOSE, origin):
            drawn = flat[draw.integers(count, size=(_CHUNK, len(place))), place]
            part[:] = drawn.reshape(_CHUNK, *shape)[: len(part)]


class CopulaPathSampler:
    """Gaussian copula: the correlation of normal scores, and the quantiles that occurred.

    The correlation is of low rank plus a diagonal, so that nothing has a row and a column for each
    step and variable.

    Args:
        residuals: Standardized held-out residuals [n, H, D].
    """

    def __init__(self, residuals: np.ndarray) -> None:
        count, *shape = residuals.shape
        self._shape, flat = tuple(shape), residuals.reshape(count, -1)
        normal = NormalDist()
        levels = (np.arange(count) + 0.5) / count
        ranked = np.array([normal.inv_cdf(level) for level in levels], np.float32)
        # Equal residuals, such as those of a constant variable, get scores in the order of rows.
        order = flat.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
        scores = ranked[order] / ranked.std()
        _, sizes, factors = np.linalg.svd(scores, full_matrices=False)
        kept = min(_FACTORS, count - 1)
        self._factors = sizes[:kept, None] * factors[:kept] / np.float32(math.sqrt(count))
        explained = np.square(self._factors).sum(axis=0)
        self._rest = np.sqrt(np.maximum(1 - explained, 0), dtype=np.float32)
        grid = np.linspace(-_LARGEST_SCORE, _LARGEST_SCORE, _SCORES)
        places = np.array([normal.cdf(score) for score in grid]) * count - 0.5
        quantiles = _between_rows(np.sort(flat, axis=0), np.clip(places, 0, count - 1))
        # The quantiles of a step and variable lie together: all samples of one are looked up there.
        self._quantiles = np.ascontiguousarray(quantiles.T)

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        for part, draw in drawn_chunks(paths, seed, _PURPOSE, origin):
            # Every product has as many rows: a sample has the same bits among few and many.
            part[:] = self._chunk(draw).reshape(_CHUNK, *self._shape)[: len(part)]

    def _chunk(self, draw: np.random.Generator) -> np.ndarray:
        scores = draw.standard_normal((_CHUNK, len(self._factors)), np.float32) @ self._factors
        scores += draw.standard_normal(scores.shape, np.float32) * self._rest
        places = (scores + _LARGEST_SCORE) * ((_SCORES - 1) / (2 * _LARGEST_SCORE))
        places = np.ascontiguousarray(np.clip(places, 0, _SCORES - 1).T)
        lower = np.minimum(places.astype(np.int64), _SCORES - 2)
        share = (places - lower).astype(np.float32)
        lower += np.arange(len(places))[:, None] * _SCORES
        table = self._quantiles.ravel()
        return (table[lower] * (1 - share) + table[lower + 1] * share).T


PATHS: dict[str, Callable[[np.ndarray], PathSampler]] = {
    "bootstrap": BootstrapPathSampler,
    "copula": CopulaPathSampler,
    "independent": IndependentPathSampler,
}


def fill_residuals(residuals: np.ndarray) -> np.ndarray:
    """Return ``residuals`` [n, H, D] without NaN, float32.

    A missing one is replaced by the one before it of the same step and variable, so that those of
    other windows are as large as they were; where a variable has few at a step, by those of the
    variable that has the most.
    """
    seen = np.isfinite(residuals)
    if seen.all():
        return residuals.astype(np.float32, copy=False)
    filled = forward_fill(residuals.reshape(len(residuals), -1)).reshape(residuals.shape)
    counts = seen.sum(axis=0)
    for step, variable in np.argwhere(few_errors(counts)):
        filled[:, step, variable] = filled[:, step, counts[step].argmax()]
    return filled.astype(np.float32, copy=False)


def drawn_chunks(
    paths: np.ndarray, seed: int, purpose: int, origin: int
) -> Iterator[tuple[np.ndarray, np.random.Generator]]:
    """Yield ``paths`` [S, H, D] in parts of few samples, each with a generator of its own."""
    for start in range(0, len(paths), _CHUNK):
        yield paths[start : start + _CHUNK], philox_generator(seed, purpose, origin, start)


def _between_rows(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return ``table`` [n, V] at rows ``places`` [m], linear between rows: [m, V]."""
    lower = np.minimum(places.astype(np.int64), max(len(table) - 2, 0))
    upper = np.minimum(lower + 1, len(table) - 1)
    share = (places - lower).astype(np.float32)[:, None]
    return table[lower] * (1 - share) + table[upper] * share


@dataclass(frozen=True)
class StandardScaler:
    """Mean and standard deviation [D] that a series is standardized by."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray) -> StandardScaler:
        """Fit to ``values`` [T, D]; a constant variable keeps its unit."""
        mean, deviation = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
        constant = deviation <= 1e-12 * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, deviation))

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Return standardized values [..., D]."""
        return (values - self.mean) / self.deviation

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return values [..., D] in the series' own units."""
        return values * self.deviation + self.mean


@dataclass(frozen=True)
class ForecastDistribution:
    """Forecast distributions of n windows in the series' own units.

    ``origins`` [n] are the windows' forecast origins, ``mean`` and ``scale`` are [n, H, D]. No path
    is below ``floor`` [D].
    """

    origins: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    floor: np.ndarray | float = -np.inf

    def __getitem__(self, part: slice) -> ForecastDistribution:
        return ForecastDistribution(
            self.origins[part], self.mean[part], self.scale[part], self.floor
        )

    def above(self, floor: np.ndarray | float) -> ForecastDistribution:
        """Return the same with nothing below ``floor`` [D]."""
        return replace(self, mean=np.maximum(self.mean, floor), floor=floor)

    def plus(self, effects: np.ndarray) -> ForecastDistribution:
        """Return the same with ``effects`` [..., H, D] added to the mean."""
        return replace(self, mean=self.mean + effects)

    def sample(self, paths: PathSampler, samples: int, *, seed: int) -> np.ndarray:
        """Return sample paths [n, samples, H, D]: the mean plus the scale times drawn ``paths``.

        Beyond the result, memory does not grow with the number of samples.
        """
        count, *shape = self.mean.shape
        result = np.empty((count, samples, *shape))
        for number, origin in enumerate(self.origins.tolist()):
            paths.sample(origin, result[number], seed=seed)
            result[number] *= self.scale[number]
            result[number] += self.mean[number]
            np.maximum(result[number], self.floor, out=result[number])
        return result


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
