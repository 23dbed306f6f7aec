"""Conversion between the values of a volume and a network's: 0..1, with one noise level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from lowtide.models.denoiser.config import NOISY_RANGE
from lowtide.models.denoiser.noise_level import LEAST_SIGMA
from lowtide.models.denoiser.variance import RicianStabilizer
from lowtide.models.denoiser.volume_level import VolumeRange


@dataclass(frozen=True)
class VolumeScale:
    """Affine conversion of one volume, after a variance-stabilizing one for Rician noise.

    Attributes:
        low: What becomes 0.
        span: What becomes 1, above ``low``: the robust range of the volume, or more where the noise
            would be stronger than a network was trained for.
        sigma: Standard deviation of the noise in the network's units.
        transform: Transform before, None for Gaussian noise.
        limits: Least and largest value of the volume, which results keep, or 0.
    """

    low: float
    span: float
    sigma: float
    transform: RicianStabilizer | None = None
    limits: tuple[float, float] = (-np.inf, np.inf)

    @classmethod
    def of(cls, values: VolumeRange, level: float, max_sigma: float, *, rician: bool) -> Self:
        """Return the conversion for noise of a ``level`` above 0, in data units."""
        transform = RicianStabilizer(level) if rician else None
        low, high, noise = values.low, values.high, level
        if transform is not None:
            low, high = transform.forward(np.array([values.low, values.high]))
            noise = 1.0
        span = max(float(high - low), noise / max_sigma)
        limits = min(0.0, values.limits[0]), max(0.0, values.limits[1])
        return cls(float(low), span, noise / span, transform, limits)

    @property
    def has_noise(self) -> bool:
        """Whether there is noise to remove."""
        return self.sigma >= LEAST_SIGMA

    def denoise(
        self, values: np.ndarray, network: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return what a network makes of a slice (H, W, 1), float32 in data units.

        Voxels that are not finite enter as the mean of the others; what keeps its value is that of
        `finished`.
        """
        finite = np.isfinite(values)
        if not finite.any():
            return values
        known = np.where(finite, values, values[finite].mean(dtype=np.float64))
        unit = self._to_unit(known)
        # What is cut off is added to the result again: one hot voxel must not change its slice.
        inside = unit.clip(*NOISY_RANGE)
        return self.finished(values, self._to_data(network(inside) + (unit - inside)))

    def finished(self, values: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Return what was made of a slice (H, W, 1), within the range of its volume.

        Magnitudes are not below 0 then, and phases not beyond their circle. What is not finite,
        before or after, keeps its value; so do areas of one value, and zeros, where there is an
        area of them: the outside of a mask.
        """
        finite = np.isfinite(values)
        kept = ~(finite & np.isfinite(made)) | _is_flat(values[..., 0])[..., None]
        return np.where(kept, values, made.clip(*self.limits)).astype(np.float32)

    def _to_unit(self, values: np.ndarray) -> np.ndarray:
        found = values if self.transform is None else self.transform.forward(values)
        return ((found - self.low) / self.span).astype(np.float32)

    def _to_data(self, unit: np.ndarray) -> np.ndarray:
        found = unit.astype(np.float64) * self.span + self.low
        return (found if self.transform is None else self.transform.inverse(found)).astype(
            np.float32
        )


def finite_difference(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return after minus before, float64, and 0 where a value is not finite."""
    finite = np.isfinite(before)
    return np.where(finite, after, 0).astype(np.float64) - np.where(finite, before, 0)


def _is_flat(image: np.ndarray) -> np.ndarray:
    """Return where an image (H, W) is part of 3 × 3 equal values, or 0 as such a part is."""
    same = _around(image) == image
    centers = same.all(0)
    flat = (_around(centers) & same).any(0)
    zero = image == 0
    return flat | zero if (centers & zero).any() else flat


def _around(image: np.ndarray) -> np.ndarray:
    """Return the 3 × 3 values around each, (9, H, W); edges are repeated."""
    height, width = image.shape
    padded = np.pad(image, 1, "edge")
    return np.stack([padded[y : y + height, x : x + width] for y in range(3) for x in range(3)])
