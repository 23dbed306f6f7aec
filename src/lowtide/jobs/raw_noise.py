"""Noise of a camera RAW file: of a table, as given, or estimated from its own planes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.jobs.chosen_noise import ChosenNoise
from lowtide.media.raw_facts import RawFacts
from lowtide.models.denoiser.noise_level import NoiseLevel
from lowtide.models.denoiser.noise_models import GaussianNoise, NoiseModel, PoissonGaussianNoise
from lowtide.models.denoiser.noise_statistics import ImageStatistics
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise
from lowtide.models.denoiser.variance_line import fit_lower_line
from lowtide.models.denoiser.variance_stabilizer import VarianceStabilizer

_CURVE = 0.1  # share of the variance


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


def estimate_shot_and_read(
    bands: Iterable[np.ndarray], black: np.ndarray, white: float
) -> PoissonGaussianNoise | None:
    """Estimate the noise of a file from rows of its planes, as `lowtide train noise` does.

    Args:
        bands: Rows (N, W, C) in levels of the file, from the top down.
        black: Black level of each plane, or of all.
        white: White level.

    Returns:
        The noise of values that are 0 at black and 1 at white, white alone where the file is too
        small to tell it by brightness; None where no pixel tells it.
    """
    offset = float(black.mean())
    shift = (offset - black).astype(np.float32)
    statistics, level = ImageStatistics(), None
    for rows in bands:
        # Black is not subtracted, so that what is darker does not count as clipped.
        planes = ((rows + shift) / np.float32(white)).astype(np.float32)
        level = NoiseLevel(planes.shape[-1]) if level is None else level
        level.add(planes)
        for plane in np.moveaxis(planes, -1, 0):
            statistics.add(plane)
    stretch = white / (white - offset)
    means, variances, counts = statistics.curve()
    if means.size:
        line, _ = fit_lower_line((means - offset / white).clip(0), variances, counts)
        return PoissonGaussianNoise(a=line.slope * stretch, b=float(np.sqrt(line.offset)) * stretch)
    sigma = level.sigma() if level is not None else None
    return None if sigma is None else PoissonGaussianNoise(a=0, b=sigma * stretch)


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
