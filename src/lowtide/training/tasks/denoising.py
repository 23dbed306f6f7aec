"""Task of an image denoiser: noisy patches, and the loss of what a network makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.training.data.file_facts import FileFacts
from lowtide.training.data.photographs import PhotographFolders
from lowtide.training.limited_build import limited_build
from lowtide.training.task import Batch, Data, Losses, Objective, Task, Term, Validator
from lowtide.training.tasks.denoise_config import DenoiseConfig
from lowtide.training.tasks.drawn_noise import DrawnNoise, clipped_share, is_linear
from lowtide.training.train_step import TrainedNetwork
from lowtide.training.weights import save_weights

NETWORK = "denoiser"
# Added to levels, of data in -1..1: without it the faintest noise would count without limit.
_FAINT = 0.01


class NoisyPatches:
    """Samples of `Batches`: noisy patches with the clean ones and what the network is given.

    Args:
        photographs: Clean patches.
        noise: Noise, drawn for each patch.
        config: The training's configuration.
    """

    def __init__(
        self, photographs: PhotographFolders, noise: DrawnNoise, config: DenoiseConfig
    ) -> None:
        data = config.datasets.train
        photographs.check_patch_size(data.patch_size)
        self._photographs, self._noise = photographs, noise
        self._patch, self._channels = data.patch_size, config.network.channels
        self._clipped = clipped_share(data, noise)
        self._steps = 65_535 if is_linear(data, noise) else 255

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

    def forward(self, networks: Mapping[str, TrainedNetwork], batch: Batch, step: int) -> Losses:
        """Return the loss ``denoising``."""
        noisy, clean, level, parameters = batch
        trained = networks[NETWORK]
        network = trained.network
        assert isinstance(network, SlimUNet)
        sigma = 2 * level  # the network's values span -1..1
        terms = preconditioning(network.config.prediction, sigma)
        shrunk, kept, made = (one[:, None, None, None] for one in terms)
        film = network.modulation(sigma, parameters if parameters.shape[1] else None)
        state = 2 * noisy - 1
        found = trained(state * shrunk, film).float()
        errors = (kept * state + made * found - (2 * clean - 1)).square().mean((1, 2, 3))
        return Losses({"denoising": Term((errors / (sigma + _FAINT)).mean())})


def make_denoiser_task(
    config: DenoiseConfig,
    network: SlimUNetConfig,
    data: Data,
    *,
    make_validator: Callable[[Path, str], Validator | None],
    files: Mapping[str, FileFacts],
) -> Task:
    """Build the task of a denoiser's training, with weights initialized from the seed."""
    torch.manual_seed(config.manual_seed)
    train = config.datasets.train
    with limited_build("network"):
        unet = SlimUNet(network)
    return Task(
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
