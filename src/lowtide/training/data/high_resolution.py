"""Dataset of high-resolution images only, whose LQ patches a degradation makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lowtide.training.data.augment import Augmentation
from lowtide.training.data.image_cache import ImageCache, unit_range
from lowtide.training.data.image_folders import ImageFolders

# Halo around a patch for the degradation, in GT pixels, and its minimum in LQ pixels: a blur's
# radius is up to 10, twice, of which the outer weights are small; a cubic filter's is 2 LQ pixels.
_HALO, _MIN_HALO = 24, 2

Degradation = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""Makes LQ (H / scale, W / scale, 3) of GT (H, W, 3), the scale and random numbers."""


class HighResolutionFolders(ImageFolders):
    """Dataset of GT folders whose LQ patches are made by a degradation.

    ``degradation`` returns LQ ``scale`` times smaller than GT. A patch is cut with a halo,
    augmented, degraded, and cropped: filters see the pixels around it, mirrored at the image's
    borders. Raises one `InputError` for all files that are damaged or not 8 or 16-bit RGB.
    """

    def __init__(
        self,
        gt: Sequence[Path],
        scale: int,
        degradation: Degradation,
        *,
        cache: ImageCache | None = None,
    ) -> None:
        super().__init__(gt, cache=cache)
        self.scale = scale
        self._degradation = degradation
        self._halo = max(_MIN_HALO, math.ceil(_HALO / scale))

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` naming files with a side below ``patch * scale`` pixels."""
        hint = "use a smaller lq_size, or remove them"
        self.require_sides(patch * self.scale, "a GT patch", hint)

    def sample(
        self, index: int, patch: int, augmentation: Augmentation, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a random GT patch with its degraded LQ, as float32 (H, W, 3) in 0..1.

        The order is LQ, GT. LQ has ``patch`` pixels on a side, GT ``patch * scale``. Patches begin
        at whole LQ pixels. Raises `InputError` for a file that is damaged or of another size than
        before.
        """
        padded = self._crop_with_halo(self.read(index), patch, generator)
        high = augmentation.draw(generator).apply(unit_range(padded))
        low = self._degradation(high, self.scale, generator)
        return _crop_halo(low, self._halo), _crop_halo(high, self._halo * self.scale)

    def _crop_with_halo(
        self, image: np.ndarray, patch: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Cut a random GT patch with its halo on all four sides."""
        halo, size = self._halo * self.scale, patch * self.scale
        spans: list[slice] = []
        missing: list[tuple[int, int]] = []
        for side in image.shape[:2]:
            # GT pixels beyond the last whole LQ pixel are dropped.
            side -= side % self.scale
            first = int(generator.integers((side - size) // self.scale + 1)) * self.scale - halo
            last = first + size + 2 * halo
            spans.append(slice(max(first, 0), min(last, side)))
            missing.append((max(-first, 0), max(last - side, 0)))
        return np.pad(image[spans[0], spans[1]], (*missing, (0, 0)), "symmetric")


def _crop_halo(image: np.ndarray, halo: int) -> np.ndarray:
    return image[halo : image.shape[0] - halo, halo : image.shape[1] - halo]
