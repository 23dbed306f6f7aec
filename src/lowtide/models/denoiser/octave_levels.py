"""Levels of noise by octaves, of brightness and of color, as a denoiser is given them."""

from __future__ import annotations

import math

import numpy as np

# How many times stronger texture is in the coarse octave than in the middle one, at least, and
# noise that JPEG left to brightness; of levels by `band_strengths`.
_TEXTURE_GROWS, _NOISE_GROWS = 3.0, 1.4
# What brightness of flat blocks has in the middle octave without any noise.
_TEXTURE = 5 / 255
_WHITE = 1.3  # largest level by the least, of the octaves that texture hardly reaches
# Exponents of an octave's next finer one: a diagonal Haar band lies between both.
_MIDDLE_REACHES, _COARSE_REACHES = 0.12, 0.25
_TINY = 1e-9


def brightness_alone(levels: np.ndarray, lost: float) -> float:
    """Return the noise of brightness in the middle octave that has no color, in JPEGs.

    Coding removes noise of colors that is weaker than its step. Texture looks alike, but is
    stronger in the coarse octave.

    Args:
        levels: Brightness by octave (3,), fine to coarse.
        lost: The strongest noise of colors that coding may have removed, 0 without coding.
    """
    _, middle, coarse = levels
    noise = (_TEXTURE_GROWS * middle) ** 2 - coarse**2
    noise /= _TEXTURE_GROWS**2 - _NOISE_GROWS**2
    return min(lost, middle, math.sqrt(max(0.0, noise - _TEXTURE**2)))


def octave_levels(levels: np.ndarray, sigma: float, lost: float) -> tuple[float, ...]:
    """Return the noise (6,) in the diagonal Haar bands of 1, 2 and 4 pixels.

    Three are of brightness and three of color; white noise has ``sigma`` in each.

    Args:
        levels: Of `band_strengths` by octave (C, 3), fine to coarse; three channels are
            `OPPONENTS`.
        sigma: The level as a whole.
        lost: As `brightness_alone` takes it.
    """
    if len(levels) != 3:
        # As three equal channels, all of whose noise is brightness.
        return (math.sqrt(3) * sigma,) * 3 + (0.0,) * 3
    bright, color = levels[0], np.sqrt((levels[1:] ** 2).mean(0))
    seen = bright[0], color[0], color[1]
    if max(seen) <= _WHITE * min(seen):
        return (sigma,) * 6
    alone = brightness_alone(bright, lost)
    middle = min(bright[1], max(color[1], alone, bright[0]))
    growth = color[2] / max(color[1], _TINY) if 2 * color[1] > middle else _NOISE_GROWS
    coarse = min(bright[2], max(color[2], middle * growth))
    return *_haar(bright[0], middle, coarse), *_haar(*color)


def _haar(fine: float, middle: float, coarse: float) -> tuple[float, float, float]:
    """Return the diagonal Haar bands of noise with these levels by octave."""
    return (
        float(fine),
        float(middle ** (1 - _MIDDLE_REACHES) * fine**_MIDDLE_REACHES),
        float(coarse ** (1 - _COARSE_REACHES) * middle**_COARSE_REACHES),
    )
