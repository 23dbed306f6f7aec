"""Calibration of a sensor's noise from flat and dark frames of one ISO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.denoise.calibration.frame_checks import (
    NeighborCorrelationEstimator,
    black_warning,
    dark_light_warning,
    plausible_white,
    require_darks_below_flats,
    require_different_content,
    require_equal_darks,
    shot_noise_warning,
)
from lowtide.jobs.denoise.calibration.frames import full_scale, read_planes, require_equal_sizes
from lowtide.models.denoiser.noise_statistics import block_statistics
from lowtide.models.denoiser.noise_table import NoiseSetting
from lowtide.models.denoiser.raw_camera_noise import DarkFrameStatistics, ReadNoiseEstimate
from lowtide.models.denoiser.variance import VarianceLine, fit_line

# Two flat frames are of the same exposure where their means differ by less.
_SAME = 0.02
_BEND = 0.05


def calibrate_sensor(
    iso: int | None, flat: list[Path], dark: list[Path], white: float | None
) -> tuple[NoiseSetting, list[str]]:
    """Return the parameters of `RawCameraNoise` at one ISO, and warnings.

    Read and row noise come from pairs of dark frames, the gain from the variance that light adds:
    a line over the mean of flat frames, block by block.

    Raises:
        InputError: There are too few frames, their sizes differ, or all are saturated.
    """
    where = "" if iso is None else f"ISO {iso}: "
    for name, paths in (("flat", flat), ("dark", dark)):
        if len(paths) < 2:
            raise InputError(
                f"{paths[0]}: {where}one {name} frame only",
                hint="take at least two of each exposure: their difference has no fixed pattern",
            )
    require_equal_sizes([*flat, *dark])
    most = full_scale(flat[0])
    if white is not None and white > most:
        raise InputError(f"{flat[0]}: --white-level {white:g} is above its largest level, {most}")
    require_different_content([*flat, *dark], most if white is None else white)
    levels, dark_levels = frame_levels(flat), frame_levels(dark)
    bright, unlit = ([(one.path, one.mean) for one in of] for of in (levels, dark_levels))
    require_darks_below_flats(bright, unlit, where)
    brightest = max(levels, key=lambda one: one.most)
    white, warnings = plausible_white(white, most, brightest.most, brightest.share, where)
    black, black_error, read, dark_variance = _dark(dark, white, where, warnings)
    require_equal_darks(unlit, dark_variance**0.5, where)
    warnings += black_warning(black, white, where)
    line = _gain(levels, black, dark_variance, white, where, warnings)
    if line.slope <= 0:
        raise InputError(
            f"{where}the flat frames are no noisier than the dark ones",
            hint="use files of raw, linear values, as the sensor gave them",
        )
    warnings += shot_noise_warning(dark, line.slope, where)
    parameters = dict(
        gain=line.slope,
        read=read.read,
        row=read.row,
        tukey_lambda=read.tukey_lambda,
        black=black,
        white=white,
    )
    errors = dict(
        gain=line.slope_error, read=read.read_error, row=read.row_error, black=black_error
    )
    if read.lambda_error is not None:
        errors["tukey_lambda"] = read.lambda_error
    return NoiseSetting(iso=iso, parameters=parameters, standard_errors=errors), warnings


def _dark(
    paths: list[Path], white: float, where: str, warnings: list[str]
) -> tuple[float, float, ReadNoiseEstimate, float]:
    """Return black level with its error, read noise, and the variance of blocks of dark frames."""
    levels: list[float] = []
    variances: list[np.ndarray] = []
    clipped, statistics, neighbors = 0.0, DarkFrameStatistics(), NeighborCorrelationEstimator()
    means: list[np.ndarray] = []
    pixels = 1
    for first, second in zip(paths[::2], paths[1::2], strict=False):
        frames = read_planes(first), read_planes(second)
        if min(frames[0].shape[1:]) < 2:
            raise InputError(f"{first}: {where}a single row or column tells no row noise")
        levels += [float(one.mean(dtype=np.float64)) for one in frames]
        clipped = max(clipped, *(float((one <= 0).mean()) for one in frames))
        for one, other in zip(*frames, strict=True):
            statistics.add(one, other)
            neighbors.add(one, other)
            # Lifted above 0: blocks with clipped pixels count too, and are told below.
            mean, variance, pixels, _ = block_statistics(one + 1, other + 1, np.inf)
            means.append(mean - mean.mean())
            variances.append(variance)
    black = float(np.mean(levels))
    variance = float(np.concatenate(variances).mean())
    if black >= white:
        raise InputError(
            f"{paths[0]}: {where}all saturated: the dark frames' level is {black:.6g}, and white"
            f" {white:g}"
        )
    if clipped > 1e-3:
        warnings.append(
            f"{where}{clipped:.1%} of a dark frame is clipped at 0: read noise and black level are"
            " wrong"
        )
    warnings += neighbors.check("dark frames", where)
    warnings += dark_light_warning(np.concatenate(means), pixels, variance, where)
    read = statistics.result()
    if read.too_fine:
        warnings.append(
            f"{where}read noise is below two levels: the shape of its distribution cannot be told"
        )
    error = float(np.std(levels, ddof=1) / np.sqrt(len(levels)))
    return black, error, read, variance


@dataclass(frozen=True)
class FrameLevel:
    """Mean and largest level of a frame, and the share of its pixels that reach that."""

    path: Path
    mean: float
    most: float
    share: float


def frame_levels(paths: list[Path]) -> list[FrameLevel]:
    """Return the levels of frames, in the order of their means."""
    found = []
    for path in paths:
        planes = read_planes(path)
        most = float(planes.max())
        mean, share = planes.mean(dtype=np.float64), (planes == most).mean()
        found.append(FrameLevel(path, float(mean), most, float(share)))
    return sorted(found, key=lambda one: (one.mean, one.path))


def _gain(
    levels: list[FrameLevel],
    black: float,
    dark_variance: float,
    white: float,
    where: str,
    warnings: list[str],
) -> VarianceLine:
    means, variances, counts, lost = [], [], [], 0
    alone, neighbors = 0, NeighborCorrelationEstimator()
    paths = [one.path for one in levels]
    for first, second in _pairs_of_one_exposure(levels):
        if second is None:
            alone += 1
            continue
        for one, other in zip(read_planes(first), read_planes(second), strict=True):
            if one.max() < white:
                neighbors.add(one, other)
            mean, variance, pixels, left_out = block_statistics(one, other, white)
            means.append(mean - black)
            variances.append(variance)
            counts.append(np.full(len(mean), pixels))
            lost += left_out
    if not means:
        raise InputError(
            f"{paths[0]}: {where}no two flat frames have the same exposure",
            hint="take two or more of each exposure",
        )
    x, y = np.concatenate(means), np.concatenate(variances)
    if not x.size:
        raise InputError(
            f"{paths[0]}: {where}all saturated: every part of the flat frames has pixels at 0 or"
            f" {white:g}",
            hint="expose less, or correct --white-level",
        )
    warnings += neighbors.check("flat frames", where)
    if alone:
        warnings.append(
            f"{where}flat frames without another of the same exposure are not used: {alone} of"
            f" {len(paths)}"
        )
    if lost:
        warnings.append(
            f"{where}clipped: {lost / (lost + x.size):.0%} of the flat frames' blocks are left out"
        )
    if x.max() < 2 * max(x.min(), 0):
        warnings.append(
            f"{where}too few levels: all flat frames are within a factor of 2, which cannot show"
            " whether values are linear"
        )
    return _checked_line(x, y, np.concatenate(counts), dark_variance, where, warnings)


def _checked_line(
    x: np.ndarray,
    y: np.ndarray,
    counts: np.ndarray,
    dark_variance: float,
    where: str,
    warnings: list[str],
) -> VarianceLine:
    """Return the line of what light adds to the variance, through 0."""
    free = fit_line(x, y, counts)
    if abs(free.bend) > _BEND:
        warnings.append(
            f"{where}not linear: at the brightest level the variance is off its line by"
            f" {abs(free.bend):.0%}"
        )
    # A block tells as much as the whole variance allows, of which light is a part.
    light = np.maximum(free.slope * x, 1e-3 * dark_variance)
    counts = 1 + (counts - 1) * (light / (light + dark_variance)) ** 2
    return fit_line(x, y - dark_variance, counts, through_zero=True)


def _pairs_of_one_exposure(levels: list[FrameLevel]) -> list[tuple[Path, Path | None]]:
    """Pair frames of nearly the same mean; None for one that has no partner."""
    found: list[tuple[Path, Path | None]] = []
    used = False
    for one, following in zip(levels, [*levels[1:], None], strict=True):
        if used:
            used = False
        elif following is not None and following.mean - one.mean <= _SAME * abs(one.mean):
            found.append((one.path, following.path))
            used = True
        else:
            found.append((one.path, None))
    return found
