"""Noise of a camera RAW file: of a table, as given, or estimated from its own planes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.jobs.images.chosen_noise import ChosenNoise
from lowtide.media.raw_facts import RawFacts
from lowtide.media.raw_file import MosaicLayout
from lowtide.models.denoiser.noise_level import NoiseEstimator
from lowtide.models.denoiser.noise_models import GaussianNoise, NoiseModel, PoissonGaussianNoise
from lowtide.models.denoiser.noise_statistics import ImageVarianceStatistics
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise
from lowtide.models.denoiser.variance import (
    VarianceLine,
    VarianceStabilizer,
    fit_lower_line,
)

_CURVE = 0.1  # share of the variance
# Share of what the noise of pixels farther apart is above that of close ones, which is subtracted
# from the latter: all of it would be texture's, if that doubled.
_TEXTURE = 0.75
_CLEARLY = 2  # standard errors


def table_noise(chosen: ChosenNoise, facts: RawFacts, source: Path) -> NoiseModel:
    """Return the noise of a table at the ISO of a file.

    Raises `UsageError` where the file has no ISO and the table several, or the ISO is outside.
    """
    try:
        return chosen.at(facts.iso)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from error


def shot_and_read(noise: NoiseModel, facts: RawFacts, source: Path) -> PoissonGaussianNoise:
    """Return noise as its shot and read part, of values that are 0 at black and 1 at white.

    Parameters of `RawCameraNoise` are in levels of the file, whatever the table's white level.
    Raises `UsageError` for noise whose variance is no line over the value.
    """
    dark, middle, bright = (float(noise.sigma(value)) ** 2 for value in (0.0, 0.5, 1.0))
    if bright < dark or abs(middle - (dark + bright) / 2) > _CURVE * middle:
        raise UsageError(
            f"{source}: {noise.name} noise is not that of a sensor, whose variance grows with the"
            " light",
            hint="--noise with a table of lowtide train noise --flat DIR --dark DIR",
        )
    scale = 1.0
    if isinstance(noise, RawCameraNoise):
        scale = (noise.white - noise.black) / facts.range
    return PoissonGaussianNoise(a=(bright - dark) * scale, b=float(np.sqrt(dark)) * scale)


@dataclass(frozen=True)
class SensorNoiseEstimate:
    """Estimated noise of values that are 0 at black and 1 at white, with its errors.

    ``a_error`` and ``b_error`` are standard errors, and include what texture may have added.
    """

    noise: PoissonGaussianNoise
    a_error: float
    b_error: float


def diagonal_parity(facts: RawFacts, layout: MosaicLayout) -> int | None:
    """Return the parity of row plus column at which a mosaic has one color, as green; or None."""
    if facts.period != 2:
        return None
    for parity, (one, other) in enumerate(((0, 3), (1, 2))):
        if facts.colors[one] == facts.colors[other]:
            return (parity + layout.top + layout.left) % 2
    return None


def estimate_shot_and_read(
    bands: Iterable[np.ndarray], black: np.ndarray, white: float, parity: int | None = None
) -> SensorNoiseEstimate | None:
    """Estimate the noise of a file from rows of its planes, as `lowtide train noise` does.

    Args:
        bands: Rows (N, W, C) in levels of the file, from the top down.
        black: Black level of each plane, or of all.
        white: White level.
        parity: That of `diagonal_parity`, of a mosaic or its four planes. Its pixels are the
            closest of one color, so that they tell the noise; by how much that of the planes is
            above it texture may have added to it too.

    Returns:
        The noise of values that are 0 at black and 1 at white, white alone where the file is too
        small to tell it by brightness; None where no pixel tells it.
    """
    offset = float(black.mean())
    shift = (offset - black).astype(np.float32)
    coarse, fine, level = ImageVarianceStatistics(), ImageVarianceStatistics(), None
    for rows in bands:
        # Black is not subtracted, so that what is darker does not count as clipped.
        planes = ((rows + shift) / np.float32(white)).astype(np.float32)
        if parity is not None:
            mosaic = _mosaic(planes)
            fine.add_diagonals(mosaic, parity)
            planes = np.stack([mosaic[y::2, x::2] for y in (0, 1) for x in (0, 1)], -1)
        level = NoiseEstimator(planes.shape[-1]) if level is None else level
        level.add(planes)
        for plane in np.moveaxis(planes, -1, 0):
            coarse.add(plane)
    stretch = white / (white - offset)
    lines = [
        fit_lower_line((means - offset / white).clip(0), variances, counts)[0]
        for means, variances, counts in (fine.curve(), coarse.curve())
        if means.size
    ]
    if lines:
        return _without_texture(lines[0], lines[-1], stretch)
    sigma = level.sigma() if level is not None else None
    if sigma is None:
        return None
    return SensorNoiseEstimate(PoissonGaussianNoise(a=0, b=sigma * stretch), 0.0, 0.0)


def _without_texture(
    fine: VarianceLine, coarse: VarianceLine, stretch: float
) -> SensorNoiseEstimate:
    """Return the noise of the line of close pixels, less what texture adds.

    Noise is the same in both, and texture about twice as much in that of pixels farther apart.
    """
    slope, offset = fine.slope - coarse.slope, fine.offset - coarse.offset
    errors = np.hypot(fine.slope_error, coarse.slope_error)
    share = _TEXTURE if -slope > _CLEARLY * errors else 0.0
    variance = max(fine.offset + share * offset, 0.0)
    b, b_error = float(np.sqrt(variance)), float(np.hypot(fine.offset_error, offset))
    return SensorNoiseEstimate(
        PoissonGaussianNoise(a=max(fine.slope + share * slope, 0.0) * stretch, b=b * stretch),
        float(np.hypot(fine.slope_error, slope)) * stretch,
        float(b_error / (2 * b) if b else np.sqrt(b_error)) * stretch,
    )


def _mosaic(planes: np.ndarray) -> np.ndarray:
    """Return the mosaic (H, W), both even, of rows (N, W', 4) or (N, W', 1) of its planes."""
    if planes.shape[-1] == 1:
        height, width = (side // 2 * 2 for side in planes.shape[:2])
        return planes[:height, :width, 0]
    blocks = planes.reshape(*planes.shape[:2], 2, 2).swapaxes(1, 2)
    return blocks.reshape(2 * planes.shape[0], 2 * planes.shape[1])


def stabilizer_for(
    noise: PoissonGaussianNoise, facts: RawFacts, max_sigma: float
) -> VarianceStabilizer:
    """Return the transform of a file's values after which a network for photographs runs.

    The brightest values become 1, and not the white level: a photograph uses its range, and noise
    of an underexposed file is as strong to the network as it is to the eye. Stronger noise than
    ``max_sigma`` becomes that.
    """
    bright = (facts.levels.bright - facts.black) / facts.range
    unit = VarianceStabilizer(noise.a, noise.b)
    return VarianceStabilizer(noise.a, noise.b, max(bright, unit.value_at_sigma(max_sigma)))


def white_noise(sigma: float, facts: RawFacts) -> GaussianNoise:
    """Return Gaussian noise of ``sigma`` levels of the file."""
    return GaussianNoise(std=sigma / facts.range)
