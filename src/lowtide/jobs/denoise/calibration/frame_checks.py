"""Checks whether frames can be what a calibration takes them for: raw, and taken one by one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.denoise.calibration.frames import read_planes
from lowtide.models.denoiser.noise_statistics import noise_response

# Correlation of the noise of neighboring pixels: sensors have a few percent at most by crosstalk, a
# demosaiced or smoothed picture 20 % and more.
_SEEN, _MOST = 0.04, 0.1
_SIDE = 32  # of blocks whose mean is not noise
_BITS = 8, 10, 12, 14, 16
# Share of the pixels of a frame that reach its largest level where a sensor is saturated.
_SATURATED = 1e-3
_MOST_BLACK = 0.2  # of white
_CLEARLY = 4  # standard errors
_OUTLIER = 6  # standard deviations: hot pixels
_SHOT = 0.1  # of the variance of dark frames


def require_different_content(paths: list[Path], white: float) -> None:
    """Raise `InputError` where two files hold the same values, unless all of them are white."""
    seen: dict[bytes, Path] = {}
    for path in paths:
        planes = read_planes(path)
        key = hashlib.sha256(planes.tobytes()).digest()
        if key in seen and planes.min() < white:
            raise InputError(
                f"{seen[key]} and {path} hold the same values: noise is what two frames differ by",
                hint="leave out copies, and frames that are black all over",
            )
        seen[key] = path


class NeighborCorrelationEstimator:
    """Correlation of the noise of neighboring pixels, over pairs of frames of one scene."""

    def __init__(self) -> None:
        self._products = np.zeros(2)
        self._square, self._count = 0.0, 0

    def add(self, first: np.ndarray, second: np.ndarray) -> None:
        """Add two planes (H, W); smaller ones than 4 × 4 tell nothing."""
        if min(first.shape) < 4:
            return
        change = first.astype(np.float64) - second
        # Neither flicker nor noise of whole rows and columns counts.
        for top in range(0, change.shape[0], _SIDE):
            for left in range(0, change.shape[1], _SIDE):
                block = change[top : top + _SIDE, left : left + _SIDE]
                block -= block.mean(1, keepdims=True)
                block -= block.mean(0, keepdims=True)
        self._products += (
            (change[1:] * change[:-1]).sum(),
            (change[:, 1:] * change[:, :-1]).sum(),
        )
        self._square += float((change**2).sum())
        self._count += change.size

    @property
    def value(self) -> float:
        """The larger of down and across; that of independent noise in such blocks is 0."""
        if not self._square:
            return 0.0
        # A block's own means take away as much from each.
        return float((self._products / self._square).max()) + 1 / (_SIDE - 1)

    def check(self, what: str, where: str) -> list[str]:
        """Return a warning; raises `InputError` where it cannot be the noise of a sensor."""
        if self.value > max(_MOST, _CLEARLY / np.sqrt(max(self._count, 1))):
            raise InputError(
                f"{where}the noise of neighboring pixels of {what} is correlated by"
                f" {self.value:.0%}: they were smoothed, developed or resized, which hides noise",
                hint="use files of raw values, as the sensor gave them",
            )
        if self.value > max(_SEEN, _CLEARLY / np.sqrt(max(self._count, 1))):
            return [
                f"{where}the noise of neighboring pixels of {what} is correlated by"
                f" {self.value:.0%}: it is stronger than measured if they were smoothed"
            ]
        return []


def require_equal_darks(dark: list[tuple[Path, float]], noise: float, where: str) -> None:
    """Raise `InputError` where a dark frame is brighter than the others, beyond drift.

    Args:
        dark: Dark frames and their means.
        noise: Standard deviation of a pixel in them.
    """
    usual = float(np.median([level for _, level in dark]))
    worst, level = max(dark, key=lambda one: abs(one[1] - usual))
    off = level - usual
    if abs(off) > max(noise, 2.0, 0.01 * usual):
        told = "brighter" if off > 0 else "darker"
        raise InputError(
            f"{worst}: {where}{abs(off):.4g} levels {told} than the other dark frames, whose"
            f" level is {usual:.4g}: one has light, or another setting",
            hint="leave it out, or take dark frames with the cap on",
        )


def require_darks_below_flats(
    flat: list[tuple[Path, float]], dark: list[tuple[Path, float]], where: str
) -> None:
    """Raise `InputError` where flat frames are not brighter than the dark ones."""
    path, level = min(flat, key=lambda one: one[1])
    black = float(np.median([one for _, one in dark]))
    folder = dark[0][0].parent
    brightest = max(one for _, one in flat)
    if brightest <= black:
        raise InputError(
            f"{folder}: {where}the dark frames, of level {black:.6g}, are brighter than the"
            f" flat ones, of {brightest:.6g}: the folders may be swapped",
            hint=f"--flat {folder} --dark {path.parent}",
        )
    if level < black:
        raise InputError(
            f"{path}: {where}a flat frame of level {level:.6g}, below the dark frames' {black:.6g}:"
            " those have light, or it is none of theirs",
            hint="take dark frames with the cap on, at the same ISO and black level",
        )


def dark_light_warning(means: np.ndarray, pixels: int, variance: float, where: str) -> list[str]:
    """Return a warning where dark frames are brighter in places: light, or a sensor's glow.

    Args:
        means: Means of their blocks, of so many ``pixels``.
        variance: Of a pixel.
    """
    low, high = np.percentile(means, [5, 95])
    spread = high - low
    if spread > max(2.0, 0.5 * np.sqrt(variance), 10 * np.sqrt(variance / pixels)):
        return [
            f"{where}dark frames are brighter in places, by {spread:.3g} levels: with light in them"
            " read noise and black level come out too high; a sensor's own glow looks the same"
        ]
    return []


def shot_noise_warning(paths: list[Path], gain: float, where: str) -> list[str]:
    """Return a warning where dark frames have shot noise, which is skewed; needs three of them.

    Of λ electrons the third cumulant is gain³·λ, and the variance gain²·λ; read noise has no skew.
    """
    cubes = squares = count = 0.0
    for one, two, three in zip(paths[::3], paths[1::3], paths[2::3], strict=False):
        first, second, third = (read_planes(path).astype(np.float64) for path in (one, two, three))
        # A fixed pattern cancels; variance and third cumulant of this are 3/2 and 3/4 of a frame's.
        change = first - (second + third) / 2
        change -= change.mean((1, 2), keepdims=True)
        change = change[np.abs(change) < _OUTLIER * change.std()]
        cubes += float((change**3).sum()) / 0.75
        squares += float((change**2).sum()) / 1.5
        count += change.size
    if not squares:
        return []
    share = cubes / gain / squares
    error = np.sqrt(6 / count * (squares / count)) / gain * 1.5**1.5 / 0.75
    if share < max(_SHOT, _CLEARLY * error):
        return []
    return [
        f"{where}{share:.0%} of the dark frames' variance is shot noise, by its skew: they have"
        " light, or the dark current of long exposures, and read noise comes out too high"
    ]


def plausible_white(
    given: float | None, most: int, peak: float, share: float, where: str
) -> tuple[float, list[str]]:
    """Return the white level of frames, and a warning where the data contradict it.

    Args:
        given: White level that was given.
        most: Largest level of the sample type.
        peak: Largest level of the frames, which ``share`` of the brightest frame's pixels reach.
    """
    white = float(most) if given is None else given
    saturated = share > _SATURATED
    if peak > white / 2 and not (saturated and peak < white):
        return white, []
    found = peak if saturated else next((1 << n) - 1.0 for n in _BITS if peak < 1 << n)
    why = (
        f"{share:.1%} of the brightest frame are at {peak:,.0f}, where the sensor is saturated"
        if saturated
        else f"nothing passes {peak:,.0f}"
    )
    if found == white:
        return white, []
    if given is None:
        return found, [
            f"{where}the white level is taken as {found:,.0f}: {why}; --white-level sets it"
        ]
    return white, [
        f"{where}the white level of {white:,.0f} is above the data: {why};"
        f" --white-level {found:.0f} may be right"
    ]


def black_warning(black: float, white: float, where: str) -> list[str]:
    """Return a warning where the level of dark frames is too high for a black level."""
    if black <= _MOST_BLACK * white:
        return []
    return [
        f"{where}the dark frames' level, {black:.6g}, is {black / white:.0%} of white: black levels"
        " are below a sixth; they may have light"
    ]


def require_noisy_pair(noisy: Path, clean: Path, images: tuple[np.ndarray, np.ndarray]) -> None:
    """Raise `InputError` where a pair of images (C, H, W) is one twice, or has them swapped."""
    if np.array_equal(*images):
        raise InputError(
            f"{noisy} and {clean} hold the same values: noise is what they differ by",
            hint="put the noisy image into noisy, and the clean one into clean",
        )
    if min(images[0].shape[1:]) < 3:
        return
    grain = [float(np.abs(noise_response(np.moveaxis(one, 0, -1))).mean()) for one in images]
    if grain[1] > 1.02 * grain[0]:
        raise InputError(
            f"{clean}: the clean image has more grain than {noisy}: the folders may be swapped",
            hint=f"swap {noisy.parent} and {clean.parent}",
        )
