"""Dataset of photographs for denoising: clean patches, in color, gray or as a mosaic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.training.data.augment import Augmentation
from lowtide.training.data.image_cache import ImageFolders, to_unit_range

# A developed photograph's white balance, undone: the share of red and blue light in a sensor's.
_UNBALANCED = 0.4, 1.0
_GRAY_MIX = 2, 2, 2  # of a Dirichlet distribution: any mix of the colors, most of all three


class PhotographFolders(ImageFolders):
    """Patches of the photographs in folders, gray or RGB, without their alpha.

    Args:
        folders: Searched recursively.
        gray: Share of color photographs' patches that are made gray.
        linear: Convert values from sRGB to values in proportion to light.
        cfa: Color filter pattern of mosaics, such as RGGB, from the patch's first pixel on; None
            for patches of all colors.

    Raises one `InputError` for all files that are damaged or not of 8 or 16 bits.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        gray: float,
        linear: bool = False,
        cfa: str | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__(folders, any_colors=True)
        self._gray, self._linear, self._cfa = gray, linear, cfa
        self._augmentation = augmentation or Augmentation()

    def check_patch_size(self, patch: int) -> None:
        """Raise `InputError` naming files with a side below ``patch`` pixels."""
        self.require_sides(patch, "a patch", "use a smaller patch_size, or remove them")

    def patch(self, index: int, size: int, random: np.random.Generator) -> np.ndarray:
        """Return a random augmented patch (C, ``size``, ``size``), float32 in 0..1.

        C is 3, or 1 where the patch is gray or a mosaic. Raises `InputError` for a file that is
        damaged or of another size than before.
        """
        image = self.read(index)
        top, left = (int(random.integers(side - size + 1)) for side in image.shape[:2])
        cut = to_unit_range(image[top : top + size, left : left + size])
        patch = self._augmentation.draw(random).apply(cut)
        return self._colored(patch, index, random)

    def whole(self, index: int, random: np.random.Generator) -> np.ndarray:
        """Return a whole photograph (C, H, W) as `patch` does, not turned."""
        return self._colored(to_unit_range(self.read(index)), index, random)

    def _colored(self, image: np.ndarray, index: int, random: np.random.Generator) -> np.ndarray:
        """Return planes (C, H, W) of an sRGB image (H, W, 3) of photograph ``index``."""
        color = linear_light(image) if self._linear else image
        if self._cfa is not None:
            return mosaic(color, self._cfa, random.uniform(*_UNBALANCED, 2))[None]
        if self._infos[index].color_channels == 1:
            color = color[..., :1]
        elif random.random() < self._gray:
            # No matrix product: its rounding depends on the number of BLAS threads.
            weights = random.dirichlet(_GRAY_MIX).astype(np.float32)
            color = (color * weights).sum(2, keepdims=True)
        return np.ascontiguousarray(np.moveaxis(color, -1, 0), np.float32)


def linear_light(values: np.ndarray) -> np.ndarray:
    """Return values in proportion to light, float32 in 0..1, of sRGB values (IEC 61966-2-1)."""
    high = ((values + np.float32(0.055)) / np.float32(1.055)) ** np.float32(2.4)
    return np.where(values <= 0.04045, values / np.float32(12.92), high).astype(np.float32)


def mosaic(color: np.ndarray, cfa: str, gains: np.ndarray) -> np.ndarray:
    """Return the mosaic (H, W) of an image (H, W, 3) through a 2 × 2 color filter pattern.

    ``gains`` multiply red and blue.
    """
    factors = {"R": gains[0], "G": 1.0, "B": gains[1]}
    made = np.empty(color.shape[:2], np.float32)
    for place, letter in enumerate(cfa):
        phase = np.s_[place // 2 :: 2, place % 2 :: 2]
        made[phase] = color[(*phase, "RGB".index(letter))] * np.float32(factors[letter])
    return made
