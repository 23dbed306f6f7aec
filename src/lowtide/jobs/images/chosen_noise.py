"""Noise that a job is given by ``--noise`` and ``--iso``, and whether a network knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.input_file import exists
from lowtide.models.denoiser.config import DenoiserConfig
from lowtide.models.denoiser.noise_level import LEAST_SIGMA, NoiseEstimate
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
    RicianNoise,
)
from lowtide.models.denoiser.noise_statistics import ImageVarianceStatistics
from lowtide.models.denoiser.noise_table import NoiseTable, load_noise, noise_model_names
from lowtide.models.denoiser.variance import fit_lower_line

NoiseSource = Literal["given", "estimated", "table"]
_GAUSSIAN, _POISSON_GAUSSIAN = GaussianNoise.name, PoissonGaussianNoise.name
# Models whose parameters a single image tells, and of volumes a single one.
ESTIMATED = _GAUSSIAN, _POISSON_GAUSSIAN
ESTIMATED_OF_VOLUMES = _GAUSSIAN, RicianNoise.name
_HASH_DIGITS = 12  # in messages
# Levels of 255 below which it does little harm to be wrong, and how many times a level is another.
_WORTH_A_NOTE, _UNLIKE = 4, 2


@dataclass(frozen=True)
class ChosenNoise:
    """Noise of a table that `lowtide train noise` wrote, or a model that is estimated.

    Attributes:
        name: Name of the noise model.
        path: File of the table; None where the noise is to be estimated.
        table: The table.
        iso: ISO of all inputs; None where each has its own, or the table one for all.
    """

    name: str
    path: Path | None = None
    table: NoiseTable | None = None
    iso: int | None = None

    def at(self, iso: int | None = None) -> NoiseModel:
        """Return the noise of the table at the ISO that was given, else at ``iso``, an input's own.

        Raises:
            UsageError: There is no ISO and the table has several, or the ISO is outside of it.
        """
        assert self.table is not None
        chosen = iso if self.iso is None else self.iso
        try:
            return self.table.at(chosen)
        except UsageError as error:
            low, high = self.table.iso_range or (0, 0)
            given = f"--iso {low}" if low == high else f"--iso N, with N from {low} to {high}"
            raise UsageError(f"{self.path}: {error.message}", hint=given) from error

    def describe(self, iso: int | None = None) -> str:
        """Return where the noise is from, for reports."""
        if self.table is None:
            return f"{self.name}, estimated"
        chosen = iso if self.iso is None else self.iso
        known = chosen is not None and self.table.iso_range is not None
        return f"{self.name} of {self.path}" + (f" at ISO {chosen}" if known else "")

    @property
    def key(self) -> str:
        """Name and content, which determine a result at an ISO."""
        return f"{self.name} {self.table.sha256 if self.table is not None else ''}"


@dataclass(frozen=True)
class ImageNoise:
    """Noise of one image as its network is given it.

    ``sigma`` is of values in 0..1, and None where the image does not tell it. ``shared`` is whether
    neighboring pixels were found to share the noise, and ``doubts`` are notes on what was found.
    """

    sigma: float | None
    parameters: tuple[float, ...]
    source: NoiseSource
    shared: bool = False
    doubts: tuple[str, ...] = ()

    @property
    def levels(self) -> float | None:
        """The level in levels of 255."""
        return None if self.sigma is None else round(self.sigma * 255, 2)

    @property
    def is_none(self) -> bool:
        """Whether there is no noise to remove, as far as is known."""
        if self.sigma is None or self.source == "table":
            return not self.sigma
        return self.sigma < LEAST_SIGMA


def choose_noise(noise: str | Path, iso: int | None = None) -> ChosenNoise:
    """Return the noise of ``--noise``: a file of a table, or the name of a model.

    Raises:
        UsageError: There is neither, the model cannot be estimated, or an ISO is given without a
            table.
        InputError: The file is no table.
    """
    if iso is not None and not 0 < iso < 10_000_000:
        raise UsageError(f"--iso {iso} is no ISO", hint="--iso 800")
    if str(noise) in noise_model_names():
        if str(noise) not in (*ESTIMATED, *ESTIMATED_OF_VOLUMES):
            raise _untold(str(noise))
        if iso is not None:
            raise UsageError(
                f"--iso {iso} chooses from a table, and --noise {noise} is none",
                hint=f"--noise FILE --iso {iso}",
            )
        return ChosenNoise(str(noise))
    path = Path(noise)
    if not exists(path):
        raise UsageError(
            f"--noise {noise} is no file, and not {' or '.join(ESTIMATED)}",
            hint="lowtide train noise --images FOLDER -o camera.json measures one",
        )
    table = load_noise(path)
    return ChosenNoise(table.noise_model, path, table, iso)


def _untold(noise: str) -> UsageError:
    return UsageError(
        f"an image alone does not tell the parameters of {noise} noise",
        hint="--noise FILE, with a table that `lowtide train noise` wrote",
    )


def require_trained_noise(chosen: ChosenNoise | None, config: DenoiserConfig, model: str) -> None:
    """Raise `UsageError` where a network was not trained for the noise that was chosen.

    Args:
        chosen: None is Gaussian noise.
        config: The network's configuration.
        model: Its name, for messages.
    """
    chosen = ChosenNoise(_GAUSSIAN) if chosen is None else chosen
    if chosen.table is None and chosen.name not in ESTIMATED:
        raise _untold(chosen.name)
    if config.noise_sha256:
        trained = f"{config.camera} ({config.noise_sha256[:_HASH_DIGITS]})"
        if chosen.table is None:
            raise UsageError(
                f"{model} was trained with the noise of {trained}, and needs it",
                hint=f"--noise FILE, the table of {config.camera} that `lowtide train noise` wrote",
            )
        if chosen.table.sha256 != config.noise_sha256:
            raise UsageError(
                f"{chosen.path} is the noise of {chosen.table.camera}"
                f" ({chosen.table.sha256[:_HASH_DIGITS]}), and {model} was trained with that of"
                f" {trained}",
                hint=f"--noise with the table of {config.camera}, or a model trained by"
                f" lowtide train denoise DATA --noise {chosen.path}",
            )
    elif chosen.name != config.noise_model and (chosen.name, config.noise_model) != (
        _GAUSSIAN,
        _POISSON_GAUSSIAN,
    ):
        where = f"{chosen.path} has" if chosen.table is not None else "--noise chooses"
        raise UsageError(
            f"{where} {chosen.name} noise, and {model} was trained with {config.noise_model}",
            hint=f"a model trained by lowtide train denoise DATA --noise"
            f" {chosen.path or chosen.name}",
        )


def estimate_doubts(
    found: NoiseEstimate, noise: NoiseModel, option: str = "--sigma"
) -> tuple[str, ...]:
    """Return notes on what an image leaves open about its noise.

    Args:
        found: The estimate by octaves of detail.
        noise: The noise that is removed.
        option: The option that gives a level.
    """
    seen, detail = found.sigma * 255, found.detail * 255
    if found.shared and found.sigma > _UNLIKE * noise.level:
        return (
            f"neighbors share noise of {seen:.1f} of 255, which --noise {noise.name} does not see;"
            " without that option it is removed",
        )
    if detail >= max(_WORTH_A_NOTE, _UNLIKE * seen):
        return (
            f"detail that neighbors share, {detail:.1f} of 255 in flat parts, was taken for"
            f" texture; where it is noise, {option} {detail:.2g} removes it",
        )
    if found.shared and seen >= _WORTH_A_NOTE and not found.has_color:
        return (
            "the noise that neighbors share is in brightness alone, where texture looks like it;"
            f" where detail is lost, {option} {seen / _UNLIKE:.2g} keeps more",
        )
    return ()


def estimate_poisson_gaussian(bands: Iterable[np.ndarray]) -> PoissonGaussianNoise | None:
    """Estimate shot noise and the rest from an image itself, as `lowtide train noise` does.

    Args:
        bands: Rows (N, W, C) of the image, float32 in 0..1; those of fewer than 11 tell nothing.

    Returns:
        The noise, or None where no pixel tells it: too few, or all clipped.
    """
    statistics = ImageVarianceStatistics()
    for rows in bands:
        for plane in np.moveaxis(rows, -1, 0):
            statistics.add(plane)
    curve = statistics.curve()
    if not curve[0].size:
        return None
    line, _ = fit_lower_line(*curve)
    return PoissonGaussianNoise(a=line.slope, b=float(np.sqrt(line.offset)))
