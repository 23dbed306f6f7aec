"""Noise of camera RAW files: shot, read and row noise, rounding; and of dark frames."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from lowtide.models.denoiser.noise_models import (
    MID_GRAY,
    NoiseModel,
    NotNegative,
    Positive,
    share_of_sum,
    shot_noise,
    standard_normal,
)

# Tukey's lambda whose distribution is closest to the normal one.
NORMAL_LAMBDA = 0.1349
_STEP_VARIANCE = 1 / 12  # of rounding to whole levels

_CHANCES = np.arange(1, 1000) / 1000
_SHAPES = np.arange(-0.4, 0.301, 0.02)
_NODES = 200, 173  # of two numbers: equal ones would give equal differences at lambda 0
_CHUNKS = 8
_MOST = 1 << 18  # values of a plane that tell a shape
_LEAST_READ = 2  # levels, below which rounding hides it


class RawCameraNoise(NoiseModel):
    """Noise of a sensor at one ISO; parameters are in levels of the file (DN).

    ``noise_parameters`` are the share of shot noise in the variance at 0.5, that of row noise in
    the variance at 0, and ``tukey_lambda``, 0.1349 where read noise is normal.

    Attributes:
        gain: Levels per electron.
        read: Standard deviation of read noise.
        row: Standard deviation of the offset that all pixels of a row share.
        tukey_lambda: Shape of read noise: heavier tails the lower it is. None is normal.
        black: Level without light.
        white: Level at which the sensor saturates.
    """

    name = "raw-camera"
    log_fields = ("gain", "read", "row")
    gain: Positive
    read: NotNegative
    row: NotNegative = 0.0
    tukey_lambda: Annotated[float, Field(gt=-0.5, le=1, allow_inf_nan=False)] | None = None
    black: NotNegative
    white: Positive

    @model_validator(mode="after")
    def _check(self) -> RawCameraNoise:
        if self.white <= self.black:
            raise ValueError(f"white {self.white:g} is not above black {self.black:g}")
        return self

    def sample(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a noisy image of a clean one (..., H, W), as a file holds it.

        Levels are whole numbers from 0 to ``white``: dark pixels go below a value of 0 as far as
        ``black`` allows.
        """
        clean = np.asarray(clean, np.float32)
        levels = shot_noise(clean * np.float32(self._range), self.gain, random)
        if self.tukey_lambda is None:
            levels += np.float32(self.read) * standard_normal(random, clean.shape)
        else:
            # Never 0 or 1, where the quantile is infinite.
            chances = (random.integers(0, 1 << 32, clean.shape) + 0.5) / (1 << 32)
            read = self.read * tukey_quantile(chances, self.tukey_lambda)
            levels += (read / tukey_deviation(self.tukey_lambda)).astype(np.float32)
        levels += np.float32(self.row) * standard_normal(random, (*clean.shape[:-1], 1))
        levels = np.rint(levels + np.float32(self.black)).clip(0, self.white)
        return ((levels - self.black) / self._range).astype(np.float32)

    def sigma(self, value: np.ndarray | float) -> np.ndarray:
        """Return the standard deviation at clean values, before a sensor clips."""
        shot = self.gain * self._range * np.maximum(value, 0.0)
        return np.sqrt(shot + self._dark_variance) / self._range

    @property
    def noise_parameters(self) -> tuple[float, ...]:
        """Share of shot noise at 0.5, share of row noise at 0, and Tukey's lambda."""
        shot, row = self.gain * self._range * MID_GRAY, self.row**2
        shape = NORMAL_LAMBDA if self.tukey_lambda is None else self.tukey_lambda
        dark = self._dark_variance
        return share_of_sum(shot, dark), share_of_sum(row, dark - row), shape

    @property
    def _range(self) -> float:
        return self.white - self.black

    @property
    def _dark_variance(self) -> float:
        return self.read**2 + self.row**2 + _STEP_VARIANCE


def tukey_quantile(chances: np.ndarray, shape: float) -> np.ndarray:
    """Return the quantiles of Tukey's lambda distribution at ``chances`` in 0..1, exclusive."""
    if abs(shape) < 1e-6:
        return np.log(chances / (1 - chances))
    return (chances**shape - (1 - chances) ** shape) / shape


def tukey_deviation(shape: float) -> float:
    """Return the standard deviation of Tukey's lambda distribution, for lambda > -0.5."""
    if abs(shape) < 1e-3:  # the formula cancels; the next term is 0.2 % here
        return math.pi / math.sqrt(3)
    overlap = math.gamma(shape + 1) ** 2 / math.gamma(2 * shape + 2)
    return math.sqrt(2 / shape**2 * (1 / (1 + 2 * shape) - overlap))


@dataclass(frozen=True)
class ReadNoiseEstimate:
    """Standard deviations of read and row noise in levels, with standard errors.

    ``tukey_lambda`` is None where normal noise fits as well. ``too_fine`` says that read noise is
    below two levels, of which quantization hides the shape.
    """

    read: float
    row: float
    read_error: float
    row_error: float
    tukey_lambda: float | None
    lambda_error: float | None
    too_fine: bool


class DarkFrameStatistics:
    """Running statistics of pairs of dark planes; a fixed pattern cancels in each pair."""

    def __init__(self) -> None:
        self._totals: list[float] = []
        self._rows: list[float] = []
        self._total_errors: list[float] = []
        self._rests: list[np.ndarray] = []
        self._shape = (0, 0)

    def add(self, first: np.ndarray, second: np.ndarray) -> None:
        """Add two planes (H, W) in levels, of at least 2 × 2 pixels and the same size always."""
        # The difference of two frames has twice the variance of one.
        change = (first.astype(np.float64) - second) / math.sqrt(2)
        height, width = self._shape = change.shape
        offsets = change.mean(1, keepdims=True)
        rest = (change - offsets).ravel()
        total = float((rest**2).sum()) / (height * (width - 1))
        # Heavy tails make a variance less certain: normal noise has a spread of 2.
        spread = max(float((rest**4).mean() / max((rest**2).mean(), 1e-30) ** 2) - 1, 0.0)
        self._totals.append(total)
        self._total_errors.append(total * math.sqrt(spread / (height * (width - 1))))
        self._rows.append(float(offsets.var(ddof=1)) - total / width)
        self._rests.append(rest[:: 1 + rest.size // _MOST].astype(np.float32))

    def result(self) -> ReadNoiseEstimate:
        """Return read and row noise of all pairs."""
        count, (height, width) = len(self._totals), self._shape
        total, row_variance = float(np.mean(self._totals)), float(np.mean(self._rows))
        total_error = float(np.linalg.norm(self._total_errors)) / count
        row_error = (max(row_variance, 0) + total / width) * math.sqrt(2 / (height - 1) / count)
        if row_variance <= 3 * row_error:
            row_variance = 0.0
        read = math.sqrt(max(total - _STEP_VARIANCE, 0.0))
        row = math.sqrt(row_variance)
        too_fine = read < _LEAST_READ
        shape, shape_error = (
            (None, None)
            if too_fine
            else fit_tukey_lambda(np.concatenate(self._rests, dtype=np.float64))
        )
        return ReadNoiseEstimate(
            read,
            row,
            _root_error(read, total_error),
            _root_error(row, row_error),
            shape,
            shape_error,
            too_fine,
        )


def _root_error(root: float, error: float) -> float:
    """Return the standard error of a root from that of its square."""
    return error / (2 * root) if root else math.sqrt(error)


def fit_tukey_lambda(differences: np.ndarray) -> tuple[float | None, float | None]:
    """Return Tukey's lambda, and its standard error, of what two frames differ by.

    It is the one whose probability plot is straightest; None where a normal plot is nearly as
    straight.
    """
    found = _straightest(differences)
    quantiles = np.quantile(differences, _CHANCES)
    normal = np.array([NormalDist().inv_cdf(chance) for chance in _CHANCES])
    bent = 1 - float(np.corrcoef(quantiles, _shape_quantiles(found))[0, 1])
    if 1 - float(np.corrcoef(quantiles, normal)[0, 1]) < 2 * bent + 1e-6:
        return None, None
    chunks = [_straightest(differences[start::_CHUNKS]) for start in range(_CHUNKS)]
    return found, float(np.std(chunks, ddof=1) / math.sqrt(_CHUNKS))


def _straightest(differences: np.ndarray) -> float:
    quantiles = np.quantile(differences, _CHANCES)
    fits = [np.corrcoef(quantiles, _shape_quantiles(float(one)))[0, 1] for one in _SHAPES]
    best = int(np.argmax(fits))
    if not 0 < best < len(fits) - 1:
        return float(_SHAPES[best])
    below, top, above = fits[best - 1 : best + 2]
    # Vertex of the parabola through the best and its neighbors.
    offset = (below - above) / (2 * (below - 2 * top + above))
    return float(_SHAPES[best] + offset * (_SHAPES[1] - _SHAPES[0]))


@cache
def _shape_quantiles(shape: float) -> np.ndarray:
    """Return quantiles of the difference of two numbers of Tukey's lambda distribution.

    That difference has no closed form. Nodes are even in log odds, which reaches into the tails.
    """
    values, weights = [], []
    for nodes in _NODES:
        chances = 1 / (1 + np.exp(-np.linspace(-14, 14, nodes)))
        values.append(tukey_quantile(chances, shape))
        weights.append(chances * (1 - chances))
    differences = np.subtract.outer(*values).ravel()
    order = np.argsort(differences)
    joint = np.outer(*weights).ravel()[order]
    sums = np.cumsum(joint)
    return np.interp(_CHANCES, (sums - joint / 2) / sums[-1], differences[order])
