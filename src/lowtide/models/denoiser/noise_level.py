"""Estimate of a noise level from the noisy image itself, strip by strip.

Of each block the strength in three octaves of detail is known (`band_strengths`), of a color image
apart for brightness and colors. Texture only adds to noise, so that the flattest blocks tell it:
those of a few percent of the blocks, of each brightness. Where they differ much from the flattest
tenth, texture is everywhere, and the noise is taken to be less by as much.

White noise is as strong in all octaves. Noise that neighbors share is stronger in coarser ones, and
counts as what it is there: that is what the eye and a network have to do with. Coarse texture
looks alike, but has little color: colors tell coarse noise. Only where a JPEG's coding may have
removed it from them, brightness alone tells what is beyond texture (`brightness_alone`).
Clipped noise is weaker by the share of clipped samples, and is counted as what it was before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from lowtide.models.denoiser.octaves import (
    BLOCK,
    OPPONENTS,
    band_sizes,
    band_strengths,
    brightness_alone,
    octave_levels,
)
from lowtide.models.denoiser.variance import fit_lower_line

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
LEAST_SIGMA = 0.5 / 255
_GROUPS = 4  # of brightness
# Shares of the blocks that are flattest, and how many blocks a group has at least.
_FLATTEST, _FLAT, _LEAST_BLOCKS = 0.03, 0.1, 32
# Found on photographs, clean and with noise of many kinds, by the error of the denoised result:
# how many times stronger than in the middle octave noise is in the coarse one before it counts for
# more.
_COARSE = 2
_SHARED = 1.3  # times the level of the finest octave
# Blocks with less of their variance are too clipped to tell it.
_LEAST_KEPT = 0.25
# Standard deviations from black and white where clipping shows, and the share of blocks beyond that
# tells the noise of all.
_NEAR_A_LIMIT, _ENOUGH = 1.5, 0.25
_NOTHING = 0.01  # times that: rounding of what has no noise
_TINY = 1e-12


@dataclass(frozen=True)
class NoiseEstimate:
    """Noise of an image with values in 0..1.

    Attributes:
        sigma: Standard deviation of white noise as strong as the noise is in its strongest octave.
        shared: Whether neighboring pixels share the noise.
        has_color: Whether colors have at least half of what brightness has of it. Else it may be
            texture, whose edges are mostly gray.
        detail: What the middle octave would have as noise if the flattest tenth of the image had no
            texture: the largest level that is plausible.
        octaves: The noise by octaves, as a `FiniteDenoiser` is given it; empty where there is none.
    """

    sigma: float
    shared: bool = False
    has_color: bool = True
    detail: float = 0.0
    octaves: tuple[float, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """The octaves as shares of ``sigma``, empty where there is no noise."""
        return tuple(one / self.sigma for one in self.octaves) if self.sigma > 0 else ()


class NoiseEstimator:
    """Running estimate of the noise level of an image of C ``channels``.

    Keeps five numbers for each channel of a block of 16 × 16 pixels.
    """

    def __init__(self, channels: int, *, lost: float = 0.0) -> None:
        """Begin an image; noise of colors up to ``lost`` a JPEG's coding may have removed."""
        self._channels, self._lost = channels, lost
        self._rows: list[np.ndarray] = []  # that are less than a strip
        # For each strip of blocks: strengths (blocks, C, 3), means and shares of the variance that
        # clipping has left (blocks, C).
        self._strips: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._sizes = band_sizes(BLOCK, BLOCK)

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
        self._sizes = band_sizes(height, side)
        seen = rows @ OPPONENTS.T.astype(np.float32) if self._channels == 3 else rows
        blocks = rows[:, : width // side * side].reshape(height, -1, side, self._channels)
        means, black, white = (
            one.mean((0, 2), dtype=np.float64) for one in (blocks, blocks == 0, blocks == 1)
        )
        kept = kept_variance(black) + kept_variance(white) - 1
        self._strips.append((band_strengths(seen), means, kept))

    def estimate(self) -> NoiseEstimate | None:
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
            return NoiseEstimate(0.0) if known.any() else None
        if noisy.sum() * 2 <= known.sum():
            return NoiseEstimate(0.0)
        whole = strengths[noisy] / np.sqrt(kept[noisy, :, None])
        means = means[noisy]
        found = self._level(whole, means.mean(1))
        if not found.shared or found.has_color:
            return found
        # Coding leaves noise to brightness alone, and hides which samples were clipped before.
        limit = _NEAR_A_LIMIT * found.sigma
        inside = np.all((means > limit) & (means < 1 - limit), axis=1)
        if np.count_nonzero(inside) < max(_LEAST_BLOCKS, _ENOUGH * len(inside)):
            return found
        return self._level(whole[inside], means[inside].mean(1))

    def sigma(self) -> float | None:
        """Return the standard deviation of the noise, or None where no pixel tells it."""
        found = self.estimate()
        return None if found is None else found.sigma

    def _level(self, strengths: np.ndarray, brightness: np.ndarray) -> NoiseEstimate:
        """Return the noise of blocks: (N, C, 3), fine to coarse, and (N,)."""
        levels = self._levels(strengths, brightness)
        finest, shared = levels[:, 0], np.maximum(levels[:, 0], self._shared_levels(levels))
        detail = _mean(_quantile(strengths, _FLAT, self._sizes)[:, 1])
        is_shared = _mean(shared) > _SHARED * _mean(finest)
        sigma = _mean(shared if is_shared else finest)
        has_color = self._channels == 3 and bool(_mean(shared[1:]) * 2 >= shared[0])
        octaves = octave_levels(levels, sigma, self._lost)
        return NoiseEstimate(sigma, is_shared, has_color or not is_shared, detail, octaves)

    def _levels(self, strengths: np.ndarray, brightness: np.ndarray) -> np.ndarray:
        """Return the noise (C, 3) of all channels and octaves at the mean brightness.

        Its variance is a line over brightness. The finest octave has the least texture, so that no
        other one's noise depends on brightness by more.
        """
        groups = max(1, min(_GROUPS, len(brightness) // _LEAST_BLOCKS))
        parts = np.array_split(np.argsort(brightness, kind="stable"), groups)
        found = [self._flattest(strengths[part], brightness[part]) for part in parts]
        variances = np.stack([noise for noise, _ in found]) ** 2
        at = np.stack([one for _, one in found])
        counts = np.full(groups, float(self._sizes[0]))
        fitted = np.empty(variances.shape[1:])
        for channel, octave in np.ndindex(*fitted.shape):
            line, _ = fit_lower_line(at[:, channel], variances[:, channel, octave], counts)
            fitted[channel, octave] = line.slope * brightness.mean() + line.offset
        least = variances.min(0)
        uneven = fitted[:, :1] / np.maximum(least[:, :1], _TINY)
        return np.sqrt(np.minimum(fitted, least * uneven))

    def _flattest(
        self, strengths: np.ndarray, brightness: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the noise (C, 3) of a group of blocks, and how bright (C,) its flat ones are."""
        flattest, flat = (_quantile(strengths, share, self._sizes) for share in (_FLATTEST, _FLAT))
        textured = np.minimum(1, flattest / np.maximum(flat, _TINY))
        fine = strengths[..., 0]
        chosen = fine <= np.quantile(fine, _FLAT, axis=0)
        at = (brightness[:, None] * chosen).sum(0) / chosen.sum(0)
        return flattest * np.sqrt(textured), at

    def _shared_levels(self, levels: np.ndarray) -> np.ndarray:
        """Return the levels (C,) of what neighbors share, of levels (C, 3) by octave."""
        _, middle, coarse = levels.T
        if self._channels != 3:
            scale = math.sqrt(3)  # of brightness among `OPPONENTS`, for three such channels
            return np.array([brightness_alone(scale * levels[0], self._lost) / scale])
        found = np.maximum(middle, coarse / _COARSE)
        of_colors = math.sqrt((found[1:] ** 2).mean())
        alone = brightness_alone(levels[0], self._lost)
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


def _mean(levels: np.ndarray) -> float:
    return float(np.sqrt((levels**2).mean()))


def kept_variance(clipped: np.ndarray) -> np.ndarray:
    """Return the share of normal noise's variance where a share ``clipped`` is at a limit.

    That of values which are equal but for their noise. Where they are not, the mean of both shares
    is close to that: a block half of which is black has .67, and not the .63 of this.
    """
    return np.interp(clipped, *_clipped_at_a_limit())


@lru_cache(maxsize=1)
def _clipped_at_a_limit() -> tuple[np.ndarray, np.ndarray]:
    """Return shares (n,) of max(x, 0) that are 0, and its variances, x normal of variance 1."""
    mean = np.linspace(6, -6, 601)
    density = np.exp(-(mean**2) / 2) / math.sqrt(2 * math.pi)
    above = np.array([(1 + math.erf(one / math.sqrt(2))) / 2 for one in mean])
    expected = mean * above + density
    return 1 - above, (mean**2 + 1) * above + mean * density - expected**2
