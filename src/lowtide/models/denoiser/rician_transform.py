"""Variance-stabilizing transform of Rician noise, and its exact unbiased inverse.

For magnitudes m of noise of standard deviation 1 in both parts, whose mean is μ(x) and standard
deviation s(x) at a clean value x, the transform is f(m) = ∫ dm / s(μ⁻¹(m)), so that its noise is
nearly 1 everywhere, background included. A denoiser of it returns E[f(m)|x], and the inverse maps
that to x: the values are those of the signal, and not lifted by the noise as magnitudes are.
The approach is that of Foi, Noise estimation and removal in MR imaging: the variance-stabilization
approach, ISBI 2011.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from lowtide.models.denoiser.noise_models import RicianNoise

_STEP = 0.02
_LARGEST = 16.0  # above, the noise is Gaussian
_SPREAD = 8.0  # of magnitudes about the clean value


class RicianTransform:
    """Transform of magnitudes with Rician noise of ``std`` to noise of 1, and back."""

    def __init__(self, std: float) -> None:
        self.std = std
        self._magnitudes, self._transformed, self._clean, self._expected = _tables()

    def forward(self, magnitudes: np.ndarray) -> np.ndarray:
        """Transform magnitudes, of any shape; those below 0 keep their sign."""
        scaled = np.abs(magnitudes.astype(np.float64)) / self.std
        found = _interpolate(scaled, self._magnitudes, self._transformed)
        return np.copysign(found, magnitudes)

    def inverse(self, expected: np.ndarray) -> np.ndarray:
        """Return the clean values, at least 0, of denoised transformed ones."""
        return self.std * _interpolate(expected, self._expected, self._clean)


def _interpolate(values: np.ndarray, places: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Interpolate in a table that goes on with a slope of 1 above, and ends below."""
    return np.interp(values, places, table) + np.maximum(values - places[-1], 0)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return magnitudes and their transform, clean values and its expectation."""
    noise = RicianNoise(std=1)
    clean = np.arange(0, _LARGEST + _SPREAD, _STEP)
    magnitudes = clean
    # Below the mean of pure noise the slope is that of pure noise.
    slopes = 1 / np.interp(magnitudes, noise.mean(clean), noise.sigma(clean))
    steps = (slopes[1:] + slopes[:-1]) / 2 * _STEP
    transformed = np.concatenate([[0.0], np.cumsum(steps)])
    clean = clean[clean <= _LARGEST]
    expected = np.array([_expectation(one, magnitudes, transformed) for one in clean])
    return magnitudes, transformed, clean, expected


def _expectation(clean: float, magnitudes: np.ndarray, transformed: np.ndarray) -> float:
    """Return the mean of the transform at a clean value, over the Rice distribution."""
    bessel = torch.special.i0e(torch.from_numpy(magnitudes * clean)).numpy()
    density = magnitudes * np.exp(-((magnitudes - clean) ** 2) / 2) * bessel
    return float(density @ transformed / density.sum())
