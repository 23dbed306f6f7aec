"""What is done to both sides of a pair alike: mirrored, turned, and other colors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Of the samples, where colors are changed at all. The others look as photographs do.
_RECOLORED = 0.5
_LEAST_CONTRAST = 0.4


@dataclass(frozen=True)
class ColorTransform:
    """A map of colors that keeps 0..1: ``mix`` (3, 3) with rows that sum to 1, then ``offset``.

    It is affine, so that it gives the same before and after a linear downscale.
    """

    mix: np.ndarray
    offset: float

    def apply(self, image: np.ndarray) -> np.ndarray:
        """float32 (H, W, 3) in 0..1 to the same."""
        # Not a product of matrices: its sums depend on the library's threads.
        mixed = np.full_like(image, self.offset)
        for band in range(3):
            mixed += image[..., band, None] * self.mix[:, band]
        return np.clip(mixed, 0, 1)


@dataclass(frozen=True)
class AugmentationDraw:
    """One draw of `Augmentation`: mirrored or not, quarter turns to the left, and colors."""

    mirrored: bool
    turns: int
    colors: ColorTransform | None

    def apply(self, image: np.ndarray) -> np.ndarray:
        """(H, W, 3), float32 in 0..1 where colors change; H and W change places by odd turns."""
        turned = np.rot90(image[:, ::-1] if self.mirrored else image, self.turns)
        return turned if self.colors is None else self.colors.apply(turned)


@dataclass(frozen=True)
class Augmentation:
    """Which changes are drawn.

    ``hflip`` mirrors half of the samples, ``rot`` turns by 0 to 3 quarters, and ``color`` mixes,
    weakens or inverts the colors of half of them: with few pictures, the bundled models gained
    more from that than from anything else.
    """

    hflip: bool = True
    rot: bool = True
    color: bool = False

    def draw(self, generator: np.random.Generator) -> AugmentationDraw:
        """The change of one sample."""
        mirrored = self.hflip and bool(generator.integers(2))
        turns = int(generator.integers(4)) if self.rot else 0
        recolored = self.color and generator.random() < _RECOLORED
        return AugmentationDraw(mirrored, turns, draw_colors(generator) if recolored else None)


def draw_colors(generator: np.random.Generator) -> ColorTransform:
    """Random weights of the bands for each band, contrast of 0.4..1, and inverted or not."""
    mix = generator.dirichlet(np.ones(3), 3)
    contrast = generator.uniform(_LEAST_CONTRAST, 1.0)
    offset = generator.uniform(0.0, 1.0 - contrast)
    if generator.integers(2):
        contrast, offset = -contrast, 1.0 - offset
    return ColorTransform((mix * contrast).astype(np.float32), float(offset))
