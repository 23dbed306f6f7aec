"""Task of a denoiser of residual paths: its windows, its objective and its validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.core.errors import InputError
from lowtide.core.philox import philox_generator
from lowtide.models.ldm4ts.model import LDM4TSModel
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
from lowtide.training.tasks.forecast_config import ForecastConfig

DENOISER = "denoiser"
# Windows that are validated on, each with as much noise in every validation; how many at once.
_VALIDATED, _VALIDATED_AT_ONCE = 128, 16
# Noise levels of neighbors in this sequence are spread evenly over all.
_GOLDEN = 0.6180339887498949
_PURPOSE = 0x76616C  # "val", in the keys of generators
_FEWEST_WINDOWS = 8


@dataclass(frozen=True)
class ResidualWindows:
    """Windows of a table: what was known at an origin, and the residual path that came.

    Attributes:
        table: File of the table, for messages.
        values: Standardized series [T, D] without NaN, float32.
        origins: Forecast origins [n], ascending, each at least ``look_back``.
        residuals: Standardized residual paths [n, H, D], float32.
        look_back: Steps before an origin that are known, L.
    """

    table: Path
    values: np.ndarray
    origins: np.ndarray
    residuals: np.ndarray
    look_back: int

    def __len__(self) -> int:
        return len(self.origins)

    def context(self, index: int) -> np.ndarray:
        """Return the look-back [L, D] of a window."""
        origin = self.origins[index]
        return self.values[origin - self.look_back : origin]

    def split(self, share: float) -> tuple[ResidualWindows, ResidualWindows]:
        """Return the windows to train on and the last ``share``, whose targets do not overlap.

        Raises:
            InputError: Too few are left.
        """
        first = len(self) - max(1, round(len(self) * share))
        before = self.origins <= self.origins[first] - self.residuals.shape[1]
        if before.sum() < _FEWEST_WINDOWS:
            raise InputError(
                f"{self.table}: {before.sum()} windows are too few to train on, of"
                f" {self.look_back:,} steps and {self.residuals.shape[1]:,} ahead",
                hint="a shorter network.look_back or horizon, or split: all",
            )
        return self._rows(before), self._rows(np.arange(len(self)) >= first)

    def _rows(self, rows: np.ndarray) -> ResidualWindows:
        return ResidualWindows(
            self.table, self.values, self.origins[rows], self.residuals[rows], self.look_back
        )


class NoisyWindows:
    """Samples of `BatchLoader`: windows, each with the noise and the noise level it is trained at.

    Args:
        windows: The windows.
        latent_shape: Shape (C, h, w) of the noise.
        levels: Noise levels.
    """

    def __init__(
        self, windows: ResidualWindows, latent_shape: tuple[int, ...], levels: int
    ) -> None:
        self._windows, self._latent_shape, self._levels = windows, latent_shape, levels

    def __len__(self) -> int:
        return len(self._windows)

    def path(self, index: int) -> Path:
        """Return the file of the table."""
        return self._windows.table

    def sample(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Return a look-back [L, D], a residual path [H, D], noise (C, h, w) and its level ()."""
        level = np.array(generator.integers(self._levels))
        noise = generator.standard_normal(self._latent_shape, np.float32)
        return self._windows.context(index), self._windows.residuals[index], noise, level

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Return a batch of ``batch`` samples as meta tensors."""
        made = self.sample(0, philox_generator(0, 0, 0, 0))
        return tuple(
            torch.from_numpy(one).to("meta").expand(batch, *one.shape).contiguous() for one in made
        )


class VelocityObjective(Objective):
    """Squared error of the denoiser's velocity, in units of the paths.

    The batch is (look-back, residual path, noise, noise level): (B, L, D), (B, H, D), (B, C, h, w)
    and (B,), int64.
    """

    trains = (DENOISER,)

    def forward(
        self, networks: Mapping[str, TrainableNetwork], batch: Batch, step: int
    ) -> ObjectiveLosses:
        """Return the loss ``denoising``."""
        context, paths, noise, level = batch
        denoiser = networks[DENOISER]
        noisy, velocity = _noisy(denoiser.network, paths, noise, level)
        made = denoiser(noisy, level, context)
        network = denoiser.network
        assert isinstance(network, LDM4TSModel)
        return ObjectiveLosses({"denoising": LossTerm(network.velocity_error(made, velocity))})


class VelocityValidator:
    """Squared error of the velocity on windows not trained on, as a share of the Gaussian's.

    It is of velocities decoded to paths, with what the network adds weighted by the ``strength``
    that is best on these windows, and 1 where the network adds nothing to the closed form. Noise
    and levels are the same in every validation.
    """

    lower_is_better = True

    def __init__(self, config: ForecastConfig, windows: ResidualWindows, device: str) -> None:
        self._device = device
        self._seed, self._levels = config.manual_seed, config.network.diffusion_steps
        rows = np.linspace(0, len(windows) - 1, min(_VALIDATED, len(windows))).round().astype(int)
        self._origins = windows.origins[rows].tolist()
        self._contexts = np.stack([windows.context(row) for row in rows])
        self._paths = windows.residuals[rows]

    @property
    def conditions(self) -> dict[str, Any]:
        """The windows that are validated on."""
        return {"metric": "error_share", "origins": self._origins}

    @torch.no_grad()
    def __call__(self, network: nn.Module, step: int) -> dict[str, float]:
        """Set the strength of ``network``; return ``error_share`` and ``strength``."""
        assert isinstance(network, LDM4TSModel)
        count = len(self._paths)
        noise = philox_generator(self._seed, _PURPOSE, 0, 0).standard_normal(
            (count, *network.latent_shape), np.float32
        )
        levels = (np.arange(count) * _GOLDEN % 1 * self._levels).astype(np.int64)
        arrays = self._contexts, self._paths, noise, levels
        windows = tuple(torch.from_numpy(one).to(self._device) for one in arrays)
        strength = network.fit_strength(*windows)
        error, usual = 0.0, 0.0
        for context, paths, noise, level in zip(
            *(one.split(_VALIDATED_AT_ONCE) for one in windows), strict=True
        ):
            noisy, velocity = _noisy(network, paths, noise, level)
            gaussian = network.gaussian.velocity(noisy, *network.angles.of(level, noisy))
            error += _error(network, network(noisy, level, context), velocity)
            usual += _error(network, gaussian, velocity)
        return {"error_share": error / usual, "strength": strength}


def make_denoising_task(
    config: ForecastConfig,
    denoiser: LDM4TSModel,
    data: BatchSource,
    *,
    save: Callable[[Path, nn.Module], Path],
    make_validator: Callable[[Path, str], Validator | None],
    files: Mapping[str, FileFacts],
) -> TrainTask:
    """Build the task of a forecaster's training, on a denoiser whose autoencoder is fitted."""
    return TrainTask(
        {DENOISER: denoiser},
        {DENOISER: config.train.optim},
        [VelocityObjective()],
        data,
        save=save,
        make_validator=make_validator,
        files=files,
        title="windows",
        smaller="a smaller network.width or network.image_size",
    )


def _noisy(
    denoiser: nn.Module, paths: Tensor, noise: Tensor, level: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the noisy latents (B, C, h, w) of residual paths, and their velocity."""
    assert isinstance(denoiser, LDM4TSModel)
    latent = denoiser.encode(paths)
    cosine, sine = denoiser.angles.of(level, latent)
    return cosine * latent + sine * noise, cosine * noise - sine * latent


def _error(denoiser: LDM4TSModel, made: Tensor, wanted: Tensor) -> float:
    """Return the sum of squared errors of velocities (B, C, h, w), decoded to paths."""
    still = made.new_zeros(len(made), *denoiser.autoencoder.noise_shape)
    first, second = (denoiser.autoencoder.decode(one, still) for one in (made, wanted))
    return float((first - second).square().sum())
