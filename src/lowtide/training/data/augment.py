"""Random augmentation of image pairs: flip, rotation and color transform."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Share of samples whose colors change; the others keep the colors of photographs.
_COLOR_PROBABILITY = 0.5
_MIN_CONTRAST = 0.4


@dataclass(frozen=True)
class ColorTransform:
    """Affine color transform of RGB: ``matrix`` (3, 3), then ``offset``, clipped to 0..1.

    As it is affine, it commutes with a linear downscale.
    """

    matrix: np.ndarray
    offset: float

    def apply(self, image: np.ndarray) -> np.ndarray:
        """Return the transformed image, float32 (H, W, 3) in 0..1 as ``image``."""
        # No matrix product: its rounding depends on the number of BLAS threads.
        mixed = np.full_like(image, self.offset)
        for channel in range(3):
            mixed += image[..., channel, None] * self.matrix[:, channel]
        return np.clip(mixed, 0, 1)


@dataclass(frozen=True)
class AugmentationDraw:
    """Parameters drawn for one sample, to apply to both images of a pair.

    ``quarter_turns`` are quarter turns counterclockwise.
    """

    hflip: bool
    quarter_turns: int
    color_transform: ColorTransform | None

    def apply(self, image: np.ndarray) -> np.ndarray:
        """Return the augmented image of ``image`` (H, W, 3).

        Odd turns swap H and W. A color transform needs float32 in 0..1.
        """
        turned = np.rot90(image[:, ::-1] if self.hflip else image, self.quarter_turns)
        return turned if self.color_transform is None else self.color_transform.apply(turned)


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of samples: horizontal flip, rotation and colors.

    ``hflip`` mirrors half of the samples. ``rot`` turns by 0 to 3 quarter turns. ``color`` mixes
    the channels, lowers the contrast or inverts the colors of half of the samples: with few
    training images, the bundled models gained more from it than from anything else.
    """

    hflip: bool = True
    rot: bool = True
    color: bool = False

    def draw(self, generator: np.random.Generator) -> AugmentationDraw:
        """Draw the augmentation of one sample."""
        mirrored = self.hflip and bool(generator.integers(2))
        turns = int(generator.integers(4)) if self.rot else 0
        recolored = self.color and generator.random() < _COLOR_PROBABILITY
        return AugmentationDraw(
            mirrored, turns, draw_color_transform(generator) if recolored else None
        )


def draw_color_transform(generator: np.random.Generator) -> ColorTransform:
    """Draw a color transform: channel mix, contrast of 0.4..1, and inversion or not."""
    mix = generator.dirichlet(np.ones(3), 3)
    contrast = generator.uniform(_MIN_CONTRAST, 1.0)
    offset = generator.uniform(0.0, 1.0 - contrast)
    if generator.integers(2):
        contrast, offset = -contrast, 1.0 - offset
    return ColorTransform((mix * contrast).astype(np.float32), float(offset))
