"""Noise that a denoiser is trained with: a noise model drawn anew for each patch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.noise_models import (
    MID_GRAY,
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
)
from lowtide.models.denoiser.noise_registry import noise_model_class, noise_model_names
from lowtide.models.denoiser.noise_table import NoiseTable, load_noise
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise
from lowtide.training.tasks.denoise_config import DenoiseConfig, PhotographData

_DRAWN = GaussianNoise.name, PoissonGaussianNoise.name
_CLIPPED = 0.25


@dataclass(frozen=True)
class DrawnNoise:
    """Noise models of random levels, or of random ISOs of a camera.

    Attributes:
        name: Name of the noise model.
        levels: Lowest and highest level without a table, of values in 0..1.
        table: Noise of a camera.
    """

    name: str
    levels: tuple[float, float]
    table: NoiseTable | None = None

    def draw(self, random: np.random.Generator) -> NoiseModel:
        """Return noise of a level drawn evenly, or of an ISO drawn evenly in its logarithm.

        Without a table, the share of shot noise is drawn evenly too.
        """
        if self.table is None:
            return self.at_level(float(random.uniform(*self.levels)), float(random.random()))
        isos = self.table.iso_range
        if isos is None:
            return self.table.at()
        low, high = map(math.log, isos)
        return self.table.at(round(math.exp(random.uniform(low, high))))

    def at_level(self, level: float, share: float) -> NoiseModel:
        """Return noise of a level, with a share of shot noise in its variance where it has any."""
        if self.name == GaussianNoise.name:
            return GaussianNoise(std=level)
        shot, rest = share * level**2, (1 - share) * level**2
        return PoissonGaussianNoise(a=shot / MID_GRAY, b=math.sqrt(rest))

    @property
    def max_level(self) -> float:
        """Highest level."""
        if self.table is None:
            return self.levels[1]
        return max(self.table.at(one.iso).level for one in self.table.settings)

    @property
    def parameter_count(self) -> int:
        """Number of parameters besides the level."""
        if self.table is None:
            return len(self.at_level(self.levels[1], 0.0).noise_parameters)
        return len(self.table.at(self.table.settings[0].iso).noise_parameters)

    @property
    def is_raw(self) -> bool:
        """Whether values are a sensor's own, rounded and clipped as it does."""
        return issubclass(noise_model_class(self.name), RawCameraNoise)


def drawn_noise(data: PhotographData) -> DrawnNoise:
    """Return the noise of a configuration.

    Raises:
        UsageError: It is neither a name nor a file.
        InputError: The file is no table.
    """
    levels = data.sigma[0] / 255, data.sigma[1] / 255
    if data.noise in _DRAWN:
        return DrawnNoise(data.noise, levels)
    path = Path(data.noise)
    if not exists(path):
        known = data.noise in noise_model_names()
        raise UsageError(
            f"datasets.train.noise: {data.noise} is "
            + ("known by a table only" if known else f"no file, and not {' or '.join(_DRAWN)}"),
            hint="--noise FILE, with a table that `lowtide train noise` wrote",
        )
    table = load_noise(path)
    return DrawnNoise(table.noise_model, levels, table)


def is_linear(data: PhotographData, noise: DrawnNoise) -> bool:
    """Return whether photographs are converted to values in proportion to light."""
    return noise.is_raw if data.linear is None else data.linear


def clipped_share(data: PhotographData, noise: DrawnNoise) -> float:
    """Return the share of patches that are clipped and rounded."""
    usual = 0.0 if noise.is_raw else _CLIPPED
    return usual if data.clipped is None else data.clipped


def network_config(config: DenoiseConfig, noise: DrawnNoise) -> SlimUNetConfig:
    """Return the network's configuration, with all that its file says of its noise.

    Raises `UsageError` for one that makes no network.
    """
    data, table = config.datasets.train, noise.table
    network: dict[str, Any] = config.network.model_dump()
    try:
        made = SlimUNetConfig(
            **network,
            noise_model=noise.name,
            noise_parameters=noise.parameter_count,
            max_sigma=noise.max_level,
            camera="" if table is None else table.camera,
            noise_sha256="" if table is None else table.sha256,
            linear=is_linear(data, noise),
            cfa=data.cfa or "",
        )
    except ModelError as error:
        raise UsageError(f"network: {error.message}", hint=error.hint) from error
    multiple = made.size.multiple_of
    if data.patch_size % multiple:
        near = max(multiple, round(data.patch_size / multiple) * multiple)
        raise UsageError(
            f"datasets.train.patch_size: {data.patch_size} is no multiple of {multiple}, which"
            f" {len(made.multipliers)} levels need",
            hint=f"--patch-size {near}",
        )
    return made
