"""Estimate of a noise level from the noisy image itself, strip by strip.

Of each block the strength in three octaves of detail is known (`band_strengths`), of a color image
apart for brightness and colors. Texture only adds to noise, so that the flattest blocks tell it:
those of a few percent of the blocks, of each brightness. Where they differ much from the flattest
tenth, texture is everywhere, and the noise is taken to be less by as much.

White noise is as strong in all octaves. Noise that neighbors share is stronger in coarser ones, and
counts as what it is there: that is what the eye and a network have to do with. Coarse texture
looks alike, but has little color: colors tell coarse noise, and brightness alone does from a level
on that texture of flat blocks seldom has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lowtide.models.denoiser.block_bands import (
    BLOCK,
    OPPONENTS,
    band_sizes,
    band_strengths,
)
from lowtide.models.denoiser.clipped_noise import kept_variance
from lowtide.models.denoiser.variance_line import fit_lower_line

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
LEAST_SIGMA = 0.5 / 255
_GROUPS = 4  # of brightness
# Shares of the blocks that are flattest, and how many blocks a group has at least.
_FLATTEST, _FLAT, _LEAST_BLOCKS = 0.03, 0.1, 32
# How much stronger noise is at the mean brightness than where it is least: where it is none, the
# rest is texture.
_UNEVEN = 8
# What brightness of flat blocks has in the middle octave without any noise, by its `OPPONENTS`.
_TEXTURE = 4 / 255
# How much stronger than in the middle octave coarse noise of colors has to be to count.
_COARSE = 2.0
_SHARED = 1.3  # times the level of the finest octave
# Power of the mean over channels of noise that neighbors share. Coding leaves such noise in
# brightness alone, and a network that knows white noise of colors removes it from there on.
_STRONGEST = 4
# Blocks with less of their variance are too clipped to tell it.
_LEAST_KEPT = 0.25
_NOTHING = 0.01  # times that: rounding of what has no noise


@dataclass(frozen=True)
class LevelEstimate:
    """Noise of an image with values in 0..1.

    Attributes:
        sigma: Standard deviation of white noise as strong as the noise is in its strongest octave.
        shared: Whether neighboring pixels share the noise.
        has_color: Whether colors have at least half of what brightness has of it. Else it may be
            texture, whose edges are mostly gray.
        detail: What the middle octave would have as noise if the flattest tenth of the image had no
            texture: the largest level that is plausible.
    """

    sigma: float
    shared: bool = False
    has_color: bool = True
    detail: float = 0.0


class NoiseLevel:
    """Running estimate of the noise level of an image of C ``channels``.

    Keeps four numbers for each channel of a block of 16 × 16 pixels.
    """

    def __init__(self, channels: int) -> None:
        self._channels = channels
        self._rows: list[np.ndarray] = []  # that are less than a strip
        # For each strip of blocks: strengths (blocks, C, 3), means and shares of the variance that
        # clipping has left (blocks, C).
        self._strips: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._size = BLOCK, BLOCK

    def add(self, rows: np.ndarray) -> None:
        """Add the next rows (N, W, C) of the image, float32 in 0..1."""
        self._rows.append(rows)
        if sum(map(len, self._rows)) < BLOCK:
            return
        rows = np.concatenate(self._rows)
        while len(rows) >= BLOCK:
            self._add_strip(rows[:BLOCK])
            rows = rows[BLOCK:]
        self._rows = [rows.copy()]

    def _add_strip(self, rows: np.ndarray) -> None:
        height, width, _ = rows.shape
        if min(height, width) < 3:
            return
        side = min(width, BLOCK)
        self._size = height, side
        seen = rows @ OPPONENTS.T.astype(np.float32) if self._channels == 3 else rows
        blocks = rows[:, : width // side * side].reshape(height, -1, side, self._channels)
        means, black, white = (
            one.mean((0, 2), dtype=np.float64) for one in (blocks, blocks == 0, blocks == 1)
        )
        kept = kept_variance(black) + kept_variance(white) - 1
        self._strips.append((band_strengths(seen), means, kept))

    def estimate(self) -> LevelEstimate | None:
        """Return the noise, or None where no pixel tells it."""
        if not self._strips and self._rows:
            self._add_strip(np.concatenate(self._rows))  # an image of less than a block
        if not self._strips:
            return None
        strengths, means, kept = (np.concatenate(one) for one in zip(*self._strips, strict=True))
        kept = kept @ (OPPONENTS**2).T if self._channels == 3 else kept
        known = kept.min(1) > _LEAST_KEPT
        # Blocks without any are areas that were drawn: an image that is mostly such has no noise,
        # and else they tell nothing.
        noisy = known & (strengths[..., 0] > LEAST_SIGMA * _NOTHING).any(1)
        if not noisy.any():
            return LevelEstimate(0.0) if known.any() else None
        if noisy.sum() * 2 <= known.sum():
            return LevelEstimate(0.0)
        whole = strengths[noisy] / np.sqrt(kept[noisy, :, None])
        return self._level(whole, means[noisy].mean(1))

    def sigma(self) -> float | None:
        """Return the standard deviation of the noise, or None where no pixel tells it."""
        found = self.estimate()
        return None if found is None else found.sigma

    def _level(self, strengths: np.ndarray, brightness: np.ndarray) -> LevelEstimate:
        """Return the noise of blocks: (N, C, 3), fine to coarse, and (N,)."""
        groups = max(1, min(_GROUPS, len(brightness) // _LEAST_BLOCKS))
        parts = np.array_split(np.argsort(brightness, kind="stable"), groups)
        variances = np.stack([self._flattest(strengths[part]) for part in parts]) ** 2
        levels = np.sqrt(variances.min(0))
        # The finest octave has the least texture, and shows how noise depends on brightness.
        fine = strengths[..., 0]
        flat = [fine[part] <= np.quantile(fine[part], _FLAT, axis=0) for part in parts]
        counts = np.full(groups, float(band_sizes(*self._size)[0]))
        for channel, of_groups in enumerate(variances[..., 0].T):
            at = [
                brightness[part][one[:, channel]].mean()
                for part, one in zip(parts, flat, strict=True)
            ]
            line, _ = fit_lower_line(np.array(at), of_groups, counts)
            found = math.sqrt(line.slope * brightness.mean() + line.offset)
            levels[channel, 0] = min(found, _UNEVEN * levels[channel, 0])
        detail = _quantile(strengths, _FLAT, band_sizes(*self._size))[:, 1]
        whole = np.maximum(levels[:, 0], self._shared_levels(levels))
        finest, sigma = _mean(levels[:, 0]), _mean(whole)
        shared = sigma > _SHARED * finest
        has_color = self._channels == 3 and _mean(whole[1:]) * 2 >= whole[0]
        level = _mean(whole, _STRONGEST) if shared else sigma
        return LevelEstimate(level, shared, has_color, _mean(detail))

    def _flattest(self, strengths: np.ndarray) -> np.ndarray:
        """Return the noise (C, 3) of a group of blocks (N, C, 3)."""
        sizes = band_sizes(*self._size)
        flattest, flat = (_quantile(strengths, share, sizes) for share in (_FLATTEST, _FLAT))
        textured = np.minimum(1, flattest / np.maximum(flat, 1e-9))
        return flattest * np.sqrt(textured)

    def _shared_levels(self, levels: np.ndarray) -> np.ndarray:
        """Return the levels (C,) of what neighbors share, of levels (C, 3) by octave."""
        _, middle, coarse = levels.T
        if self._channels != 3:
            return np.sqrt(np.maximum(0, middle**2 - _TEXTURE**2 / 3))
        found = np.maximum(middle, coarse / _COARSE)
        of_colors = math.sqrt((found[1:] ** 2).mean())
        alone = math.sqrt(max(0.0, middle[0] ** 2 - _TEXTURE**2))
        return np.array([min(found[0], max(of_colors, alone)), *found[1:]])


def _quantile(strengths: np.ndarray, share: float, sizes: np.ndarray) -> np.ndarray:
    """Return the noise (C, 3) whose flattest ``share`` of blocks (N, C, 3) is as strong.

    A mean of n absolute values of normal variables, of which the bands have ``sizes``, is itself
    about normal.
    """
    count = len(strengths)
    rank = (share * (count - 1) + 0.625) / (count + 0.25)
    spread = np.sqrt((math.pi / 2 - 1) / np.maximum(sizes, 1))
    expected = 1 + NormalDist().inv_cdf(rank) * spread
    return np.quantile(strengths, share, axis=0) / np.maximum(expected, 0.1)


def _mean(levels: np.ndarray, power: float = 2) -> float:
    return float((levels**power).mean() ** (1 / power))
