"""Noise of camera RAW files: shot, read and row noise, and quantization."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from lowtide.models.denoiser.noise_models import (
    MID_GRAY,
    NoiseModel,
    NotNegative,
    Positive,
    normal,
    share,
    shot_noise,
)

# Tukey's lambda whose distribution is closest to the normal one.
NORMAL_LAMBDA = 0.1349
_STEP_VARIANCE = 1 / 12  # of rounding to whole levels


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
            levels += np.float32(self.read) * normal(random, clean.shape)
        else:
            # Never 0 or 1, where the quantile is infinite.
            chances = (random.integers(0, 1 << 32, clean.shape) + 0.5) / (1 << 32)
            read = self.read * tukey_quantile(chances, self.tukey_lambda)
            levels += (read / tukey_deviation(self.tukey_lambda)).astype(np.float32)
        levels += np.float32(self.row) * normal(random, (*clean.shape[:-1], 1))
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
        return share(shot, dark), share(row, dark - row), shape

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
