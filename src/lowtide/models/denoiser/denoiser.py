"""Denoisers: networks at one noise level, as modules from image to image."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.models.denoiser.config import (
    DenoiserConfig,
    Prediction,
    SlimUNetConfig,
)
from lowtide.models.denoiser.noise_models import GaussianNoise, network_terms
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.models.descriptor import SizeRule, Tiling
from lowtide.models.loaded_model import Model

_SPAN = 2  # of the network's values, which are -1..1
# Level at which networks are measured.
_NOMINAL_SIGMA = 25 / 255


class PixelAffine(nn.Module):
    """Gain and offset that are equal for all pixels of an image.

    A leaf with buffers, so that `to_low_precision` keeps it in fp32.
    """

    terms: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("terms", torch.zeros(2), persistent=False)

    def set(self, gain: float, offset: float) -> None:
        """Change the terms in place, so that captured graphs follow."""
        self.terms.copy_(torch.tensor([gain, offset]))

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return image * self.terms[:1] + self.terms[1:]


class LeveledDenoiser(nn.Module):
    """Base of the denoisers: a network of ``config`` that has to be given the noise level."""

    # Streaming captures a module anew where other attributes have changed.
    _ignored_attributes = frozenset({"sigma"})

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.sigma: float | None = None

    def set_level(self, sigma: float, parameters: Sequence[float] | None = None) -> None:
        """Set the level, of values in 0..1, and what else describes the noise; white by default."""
        raise NotImplementedError

    def forward_at(self, image: Tensor, sigma: Tensor) -> Tensor:
        """Map (B, C, H, W) with white noise of ``sigma`` (1,) to (B, C, H, W), as `forward` does.

        Whatever `set_level` set is not used: an exported graph has the level as an input.
        """
        raise NotImplementedError

    def require_level(self) -> None:
        """Raise `UsageError` where no level was set."""
        if self.sigma is None:
            raise UsageError(
                "a denoiser has to be told how strong the noise is",
                hint="lowtide denoise estimates it; `model.module.set_level(25 / 255)` sets it",
            )


class Denoiser(LeveledDenoiser):
    """A `SlimUNet` at one noise level.

    Maps noisy (B, C, H, W) in 0..1 to the expected clean image, unclamped, once `set_level` was
    called; at level 0 it is the identity. The level lies in buffers: it can be changed without
    building, capturing or compiling anything again.
    """

    film: Tensor
    config: SlimUNetConfig

    def __init__(self, config: SlimUNetConfig) -> None:
        super().__init__(config)
        self.unet = SlimUNet(config)
        self.enter, self.keep, self.leave = PixelAffine(), PixelAffine(), PixelAffine()
        film = torch.zeros(1, 2 * sum(config.film_channels), 1, 1)
        self.register_buffer("film", film, persistent=False)

    @torch.no_grad()
    def set_level(self, sigma: float, parameters: Sequence[float] | None = None) -> None:
        """Set the noise level.

        Args:
            sigma: Standard deviation of the noise, of values in 0..1.
            parameters: The ``noise_parameters`` other values that describe the noise. Default:
                those of Gaussian noise.

        Raises:
            UsageError: A value is not a finite number, there are too few or too many, or the
                network does not know Gaussian noise.
        """
        self.film.copy_(modulation_at(self.unet, sigma, parameters))
        parts = self.enter, self.keep, self.leave
        for part, terms in zip(parts, pixel_terms(self.config, sigma), strict=True):
            part.set(*terms)
        self.sigma = sigma

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to (B, C, H, W); sides are multiples of the size rule's."""
        self.require_level()
        return self.keep(image) + self.leave(self.unet(self.enter(image), self.film))

    def forward_at(self, image: Tensor, sigma: Tensor) -> Tensor:
        """Map (B, C, H, W) with white noise of ``sigma`` (1,) to (B, C, H, W)."""
        white = self.config.white_parameters
        film = self.unet.modulation(_SPAN * sigma, image.new_tensor([white]) if white else None)
        enter, keep, leave = pixel_terms(self.config, sigma)
        made = self.unet(image * enter[0] + enter[1], film)
        return image * keep[0] + keep[1] + made * leave[0]


def modulation_at(
    unet: SlimUNet, sigma: float, parameters: Sequence[float] | None = None
) -> Tensor:
    """Return the gains and shifts of a network at one noise level.

    Arguments and errors are those of `Denoiser.set_level`.
    """
    require_sigma(sigma)
    if parameters is None:
        _, parameters = network_terms(GaussianNoise(std=sigma), unet.config)
    require_denoiser_level(unet.config, sigma, parameters)
    given = torch.tensor([_SPAN * sigma], device=unet.film.weight.device)
    more = given.new_tensor([list(parameters)]) if parameters else None
    return unet.modulation(given, more)


def pixel_terms(config: SlimUNetConfig, sigma: float | Tensor) -> tuple[tuple[Any, Any], ...]:
    """Return gain and offset of an image on its way into the network, past it and out of it.

    The image is in 0..1, and the clean one is the sum of what went past and what came out. Terms
    are numbers or tensors, as ``sigma`` is.
    """
    shrunk, kept, made = preconditioning_terms(config.prediction, _SPAN * sigma)
    # x = 2 image - 1 on the way in, and the inverse on the way out.
    return (2 * shrunk, -shrunk), (kept, (1 - kept) / 2), (made / 2, 0.0)


def require_denoiser_level(
    config: DenoiserConfig, sigma: float, parameters: Sequence[float]
) -> None:
    """Raise `UsageError` for a level, or parameters of the noise, that a network cannot be given.

    ``sigma`` is of values in 0..1.
    """
    require_sigma(sigma)
    if len(parameters) != config.noise_parameters:
        raise UsageError(
            f"this denoiser's noise has {config.noise_parameters} parameters besides its"
            f" level, not {len(parameters)}"
        )
    if not all(map(math.isfinite, parameters)):
        raise UsageError(f"noise parameters have to be finite, not {list(parameters)}")


def preconditioning_terms(prediction: Prediction, sigma: float | Tensor) -> tuple[Any, Any, Any]:
    """Return the terms (a, b, c) of x₀ = b·y + c·F(a·y), for data of unit variance.

    y is x₀ plus noise of standard deviation ``sigma``, and a·y is the state of a process that
    preserves variance. The terms are numbers or tensors, as ``sigma`` is.
    """
    shrunk = 1 / (1 + sigma**2) ** 0.5
    if prediction == "epsilon":
        return shrunk, 0 * sigma + 1, -sigma
    if prediction == "sample":
        return shrunk, 0 * sigma, 0 * sigma + 1
    return shrunk, shrunk**2, -sigma * shrunk


def require_sigma(sigma: float) -> None:
    """Raise `UsageError` for a level that is not a finite number of at least 0."""
    if not (math.isfinite(sigma) and sigma >= 0):
        raise UsageError(f"a noise level is a finite number of at least 0, not {sigma:g}")


def set_nominal_level(module: nn.Module) -> None:
    """Give the denoisers in a module a level at which it can be measured: its costs have none.

    Noise is white where a network knows that, so that nothing of its result is multiplied by 0.
    """
    for denoiser in denoisers_in(module):
        config = denoiser.config
        denoiser.set_level(
            _NOMINAL_SIGMA, config.white_parameters or (0.0,) * config.noise_parameters
        )


def denoisers_in(network: Callable[..., Any]) -> Iterator[LeveledDenoiser]:
    """Iterate over the denoisers in a network: itself, or what wraps it."""
    if isinstance(network, nn.Module):
        yield from (part for part in network.modules() if isinstance(part, LeveledDenoiser))


class DenoiserThenNetwork(nn.Module):
    """Two networks in a row: (B, C, H, W) in 0..1 denoised, and what the second makes of it."""

    def __init__(self, denoiser: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.network = denoiser, network

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to the second network's (B, C', H * scale, W * scale)."""
        return self.network(self.denoiser(image).clamp(0, 1))


def prepend_denoiser(denoiser: Model, model: Model) -> Model:
    """Return ``model`` of what ``denoiser`` makes of an image, as one model.

    Raises:
        ModelError: It does not take the denoiser's channels.
    """
    first, second = denoiser.descriptor, model.descriptor
    if first.out_channels != second.in_channels:
        raise ModelError(
            f"{second.name} takes {second.in_channels} channels, and {first.name} makes"
            f" {first.out_channels}",
            hint="denoise first: lowtide denoise INPUT -o OUTPUT",
        )
    sizes = first.size, second.size
    both = replace(
        second,
        name=f"{second.name} after {first.name}",
        size=SizeRule(
            max(one.minimum for one in sizes),
            math.lcm(*(one.multiple_of for one in sizes)),
            any(one.square for one in sizes),
        ),
        supports_half=first.supports_half and second.supports_half,
        supports_bfloat16=first.supports_bfloat16 and second.supports_bfloat16,
        sha256=hashlib.sha256(f"{first.sha256} {second.sha256}".encode()).hexdigest(),
        tiling=max((one.tiling for one in (first, second)), key=get_args(Tiling).index),
        path=None,
    )
    return Model(DenoiserThenNetwork(denoiser.module, model.module), both)
