"""Task of an image denoiser: noise drawn for each patch, and the loss of what a network makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning_terms
from lowtide.models.denoiser.noise_models import (
    MID_GRAY,
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
)
from lowtide.models.denoiser.noise_table import (
    NoiseTable,
    load_noise,
    noise_model_class,
    noise_model_names,
)
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.training.data.photographs import PhotographFolders
from lowtide.training.setup import limited_build, save_weights
from lowtide.training.state import FileFacts
from lowtide.training.task import (
    Batch,
    BatchSource,
    LossTerm,
    Objective,
    ObjectiveLosses,
    TrainableNetwork,
    TrainTask,
    Validator,
)
from lowtide.training.tasks.denoise_config import DenoiseConfig, PhotographDataSection

NETWORK = "denoiser"
# Added to levels, of data in -1..1: without it the faintest noise would count without limit.
_FAINT = 0.01

_DRAWN = GaussianNoise.name, PoissonGaussianNoise.name
_CLIPPED = 0.25


class NoisyPatches:
    """Samples of `BatchLoader`: noisy patches with the clean ones and what the network is given.

    Args:
        photographs: Clean patches.
        noise: Noise, drawn for each patch.
        config: The training's configuration.
    """

    def __init__(
        self, photographs: PhotographFolders, noise: NoiseModelSampler, config: DenoiseConfig
    ) -> None:
        data = config.datasets.train
        photographs.check_patch_size(data.patch_size)
        self._photographs, self._noise = photographs, noise
        self._patch, self._channels = data.patch_size, config.network.channels
        self._clipped = clipped_share(data, noise)
        self._steps = 65_535 if uses_linear_light(data, noise) else 255

    def __len__(self) -> int:
        return len(self._photographs)

    def path(self, index: int) -> Path:
        """Return the file of a photograph."""
        return self._photographs.path(index)

    def sample(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Return noisy and clean (C, H, W), level () and other parameters (k,), float32.

        Values are 0..1, noisy ones beyond that as far as noise goes. Gray patches of color networks
        are three equal channels, with one noise, as they are where files are denoised.
        """
        clean = self._photographs.patch(index, self._patch, generator)
        noise = self._noise.draw(generator)
        noisy = noise.sample(clean, generator)
        if generator.random() < self._clipped:
            noisy = np.rint(noisy.clip(0, 1) * self._steps) / np.float32(self._steps)
        shape = (self._channels, *clean.shape[1:])
        return (
            np.broadcast_to(noisy, shape),
            np.broadcast_to(clean, shape),
            np.array(noise.level, np.float32),
            np.array(noise.noise_parameters, np.float32),
        )

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Return a batch of ``batch`` samples as meta tensors."""
        image = self._channels, self._patch, self._patch
        shapes = image, image, (), (self._noise.parameter_count,)
        return tuple(torch.empty(batch, *shape, device="meta") for shape in shapes)


class CleanImageObjective(Objective):
    """Squared error of the clean image that a network predicts, relative to the noise level.

    At a tenth of the noise the best error is about a tenth too, so that all levels count alike. The
    batch is (noisy, clean, level, parameters): twice (B, C, H, W) in 0..1, (B,) and (B, k).
    """

    trains = (NETWORK,)

    def forward(
        self, networks: Mapping[str, TrainableNetwork], batch: Batch, step: int
    ) -> ObjectiveLosses:
        """Return the loss ``denoising``."""
        noisy, clean, level, parameters = batch
        trained = networks[NETWORK]
        network = trained.network
        assert isinstance(network, SlimUNet)
        sigma = 2 * level  # the network's values span -1..1
        terms = preconditioning_terms(network.config.prediction, sigma)
        shrunk, kept, made = (one[:, None, None, None] for one in terms)
        film = network.modulation(sigma, parameters if parameters.shape[1] else None)
        state = 2 * noisy - 1
        found = trained(state * shrunk, film).float()
        errors = (kept * state + made * found - (2 * clean - 1)).square().mean((1, 2, 3))
        return ObjectiveLosses({"denoising": LossTerm((errors / (sigma + _FAINT)).mean())})


def make_denoiser_task(
    config: DenoiseConfig,
    network: SlimUNetConfig,
    data: BatchSource,
    *,
    make_validator: Callable[[Path, str], Validator | None],
    files: Mapping[str, FileFacts],
) -> TrainTask:
    """Build the task of a denoiser's training, with weights initialized from the seed."""
    torch.manual_seed(config.manual_seed)
    train = config.datasets.train
    with limited_build("network"):
        unet = SlimUNet(network)
    return TrainTask(
        {NETWORK: unet},
        {NETWORK: config.train.optim},
        [CleanImageObjective()],
        data,
        save=lambda path, trained: save_denoiser(path, trained, config),
        make_validator=make_validator,
        files=files,
        title=f"patches of {train.patch_size} px",
        smaller="a smaller datasets.train.patch_size or network.features",
    )


def save_denoiser(path: Path, network: nn.Module, config: DenoiseConfig) -> Path:
    """Write a `SlimUNet` as the file that `lowtide denoise` takes, and return the path.

    Raises `OutputError`.
    """
    assert isinstance(network, SlimUNet)
    denoiser = Denoiser(network.config)
    denoiser.unet = network
    return save_weights(path, denoiser, config)


@dataclass(frozen=True)
class NoiseModelSampler:
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


def noise_model_sampler(data: PhotographDataSection) -> NoiseModelSampler:
    """Return the noise of a configuration.

    Raises:
        UsageError: It is neither a name nor a file.
        InputError: The file is no table.
    """
    levels = data.sigma[0] / 255, data.sigma[1] / 255
    if data.noise in _DRAWN:
        return NoiseModelSampler(data.noise, levels)
    path = Path(data.noise)
    if not exists(path):
        known = data.noise in noise_model_names()
        raise UsageError(
            f"datasets.train.noise: {data.noise} is "
            + ("known by a table only" if known else f"no file, and not {' or '.join(_DRAWN)}"),
            hint="--noise FILE, with a table that `lowtide train noise` wrote",
        )
    table = load_noise(path)
    return NoiseModelSampler(table.noise_model, levels, table)


def uses_linear_light(data: PhotographDataSection, noise: NoiseModelSampler) -> bool:
    """Return whether photographs are converted to values in proportion to light."""
    return noise.is_raw if data.linear is None else data.linear


def clipped_share(data: PhotographDataSection, noise: NoiseModelSampler) -> float:
    """Return the share of patches that are clipped and rounded."""
    usual = 0.0 if noise.is_raw else _CLIPPED
    return usual if data.clipped is None else data.clipped


def denoiser_network_config(config: DenoiseConfig, noise: NoiseModelSampler) -> SlimUNetConfig:
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
            linear=uses_linear_light(data, noise),
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
