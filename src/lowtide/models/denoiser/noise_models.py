"""Noise models: how a camera or a scanner turns a clean image into a noisy one.

A model describes one setting (one ISO); `lowtide.models.denoiser.noise_table` holds a camera's.
Values are linear and span 0..1, from the black to the white level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lowtide.models.denoiser.config import DenoiserConfig

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Where a level that depends on the value is one number.
MID_GRAY = 0.5
# Standard deviations above which Rician noise is Gaussian, to all digits that its moments leave.
_FAR_ABOVE = 1e5


class NoiseModel(BaseModel, ABC):
    """Noise at one setting; a subclass's fields are its parameters.

    Other packages add models by the entry point group ``lowtide.noise_models``: the entry's name is
    the model's, its object a subclass of this.

    Attributes:
        name: Name in files and on the command line.
        log_fields: Fields whose logarithms are linear in that of the ISO.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str]
    log_fields: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def sample(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a noisy image, float32, of a clean one (..., H, W) in 0..1.

        Equal generators (`lowtide.core.philox`) give equal noise. Results are not clipped to 0..1:
        noise goes below 0 and above 1, unless the model says what a sensor clips.
        """

    @abstractmethod
    def sigma(self, value: np.ndarray | float) -> np.ndarray:
        """Return the standard deviation at clean values in 0..1, float64 of their shape.

        That of noise which nothing has clipped.
        """

    def mean(self, value: np.ndarray | float) -> np.ndarray:
        """Return the expected noisy value at clean values, float64 of their shape."""
        return np.asarray(value, np.float64)

    @property
    def level(self) -> float:
        """Standard deviation at a value of 0.5: the ``sigma`` that a network is given."""
        return float(self.sigma(MID_GRAY))

    @property
    def noise_parameters(self) -> tuple[float, ...]:
        """What a network is given besides ``level``: finite numbers of the order of 1."""
        return ()


class GaussianNoise(NoiseModel):
    """White noise of standard deviation ``std``, whatever the value."""

    name = "gaussian"
    log_fields = ("std",)
    std: NotNegative

    def sample(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a noisy image of a clean one (..., H, W)."""
        clean = np.asarray(clean, np.float32)
        return clean + np.float32(self.std) * standard_normal(random, clean.shape)

    def sigma(self, value: np.ndarray | float) -> np.ndarray:
        """Return the standard deviation at clean values."""
        return np.full(np.shape(value), self.std)


class PoissonGaussianNoise(NoiseModel):
    """Shot noise and white noise: at a value of x the variance is ``a``·x + ``b``².

    ``noise_parameters`` is the share of shot noise in the variance at 0.5: with ``level`` it
    tells both parameters.
    """

    name = "poisson-gaussian"
    log_fields = ("a", "b")
    a: NotNegative
    b: NotNegative

    def sample(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a noisy image of a clean one (..., H, W); shot noise takes x < 0 for 0."""
        noisy = shot_noise(np.asarray(clean, np.float32), self.a, random)
        return noisy + np.float32(self.b) * standard_normal(random, noisy.shape)

    def sigma(self, value: np.ndarray | float) -> np.ndarray:
        """Return the standard deviation at clean values."""
        return np.sqrt(self.a * np.maximum(value, 0.0) + self.b**2)

    @property
    def noise_parameters(self) -> tuple[float, ...]:
        """Share of shot noise in the variance at 0.5, 0 without noise."""
        return (share_of_sum(self.a * MID_GRAY, self.b**2),)


class RicianNoise(NoiseModel):
    """Magnitude of a complex value with white noise of ``std`` in both parts (MRI)."""

    name = "rician"
    log_fields = ("std",)
    std: Positive

    def sample(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return noisy magnitudes of clean ones (..., H, W); never below 0."""
        clean = np.asarray(clean, np.float32)
        real, imaginary = np.float32(self.std) * standard_normal(random, (2, *clean.shape))
        return np.hypot(clean + real, imaginary)

    def mean(self, value: np.ndarray | float) -> np.ndarray:
        """Return the expected noisy value, which is above the clean one."""
        import torch

        ratio = np.asarray(value, np.float64) / self.std
        half = torch.as_tensor(np.minimum(ratio, _FAR_ABOVE) ** 2 / 4)
        # Laguerre's L½ by Bessel functions that are scaled, since they would overflow.
        laguerre = (1 + 2 * half) * torch.special.i0e(half) + 2 * half * torch.special.i1e(half)
        near = self.std * np.sqrt(np.pi / 2) * laguerre.numpy()
        return np.where(ratio < _FAR_ABOVE, near, value)

    def sigma(self, value: np.ndarray | float) -> np.ndarray:
        """Return the standard deviation at clean values: two thirds of ``std`` at 0."""
        value = np.asarray(value, np.float64)
        near = value < _FAR_ABOVE * self.std
        second = 2 * self.std**2 + np.where(near, value, 0) ** 2
        spread = np.sqrt(np.maximum(second - np.where(near, self.mean(value), 0) ** 2, 0.0))
        return np.where(near, spread, self.std)

    @property
    def level(self) -> float:
        """Standard deviation of either part: that of magnitudes far above it."""
        return self.std


def standard_normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return standard normal numbers, float32."""
    return random.standard_normal(shape, np.float32)


def shot_noise(clean: np.ndarray, gain: float, random: np.random.Generator) -> np.ndarray:
    """Return float32 Poisson counts times ``gain``, of expectation ``clean``.

    With a gain of 0 there is no noise; values below 0 count as 0.
    """
    if gain == 0:
        return clean.copy()
    expected = np.maximum(clean, 0).astype(np.float64) / gain
    return (random.poisson(expected) * gain).astype(np.float32)


def share_of_sum(part: float, rest: float) -> float:
    """Return the share of ``part`` in the sum with ``rest``, 0 where both are."""
    return part / (part + rest) if part > 0 else 0.0


def network_terms(noise: NoiseModel, config: DenoiserConfig) -> tuple[float, tuple[float, ...]]:
    """Return level (of values in 0..1) and parameters of noise as a network takes them."""
    if isinstance(noise, GaussianNoise):
        return noise.level, config.white_parameters
    return noise.level, noise.noise_parameters
