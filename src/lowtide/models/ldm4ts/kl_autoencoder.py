"""Frozen diffusers AutoencoderKL as an autoencoder of residual paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import InputError, ModelError, UsageError
from lowtide.core.input_file import require_input
from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.path_image import PathImageMap

# Images that the network sees at once, and paths that its losses are measured on.
_CHUNK, _MEASURED = 16, 256


class KLPathAutoencoder(nn.Module):
    """Frozen diffusers ``AutoencoderKL``, which sees each variable's path image as a grey one.

    Images are scaled to [-1, 1] by the largest residual that `fit` saw; larger ones later go
    beyond and are not clipped. Latents are standardized by the mean and deviation of each channel.
    The round trip is fitted to the paths step by step, and what it loses of their variance is
    given back as noise. The network is in evaluation mode and float32, and sees 16 images at a
    time.

    Args:
        config: Horizon, variables, period, image size and folder.

    Attributes:
        latent_shape: Channels, height and width of a latent; D times the network's channels.
        noise_shape: Shape [H, D] of the noise of a path.

    Raises:
        ModelError: The folder holds no ``AutoencoderKL``.
        UsageError: diffusers is not installed, or the network does not fit the image size.
    """

    factor: Tensor
    latent_mean: Tensor
    latent_deviation: Tensor
    slope: Tensor
    offset: Tensor
    rest: Tensor

    def __init__(self, config: LDM4TSConfig) -> None:
        super().__init__()
        if config.autoencoder is None:
            raise UsageError("there is no folder of an AutoencoderKL", hint="set autoencoder")
        self.noise_shape = config.horizon, config.variables
        with torch.device("cpu"):
            self.network = _load_kl(config.autoencoder)
            self._image = PathImageMap(*self.noise_shape, config.period, config.image_size)
        sizes = self.network.config
        shrink = 2 ** (len(sizes.block_out_channels) - 1)
        height, width = config.image_size
        if height % shrink or width % shrink:
            raise UsageError(
                f"{config.autoencoder} halves images of {height}x{width} to {shrink} times less",
                hint=f"give an image_size of multiples of {shrink}",
            )
        channels = config.variables * sizes.latent_channels
        self.latent_shape = channels, height // shrink, width // shrink
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("latent_mean", torch.zeros(channels, 1, 1))
        self.register_buffer("latent_deviation", torch.ones(channels, 1, 1))
        self.register_buffer("slope", torch.ones(self.noise_shape))
        self.register_buffer("offset", torch.zeros(self.noise_shape))
        self.register_buffer("rest", torch.zeros(self.noise_shape))

    def train(self, mode: bool = True) -> KLPathAutoencoder:
        """Switch all but the network, which stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    @torch.no_grad()
    def fit(self, paths: Tensor) -> None:
        """Measure scales and losses on ``paths`` [N, H, D], on at most 256 of them, evenly spread.

        Raises:
            InputError: There are fewer than two paths, or values that are not finite.
        """
        require_paths(paths)
        self.factor.copy_(paths.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
        rows = torch.linspace(0, len(paths) - 1, min(len(paths), _MEASURED)).long()
        paths = paths[rows.to(paths.device)].to(self.factor.device, torch.float32)
        raw = self._compress(paths).double()
        mean = raw.mean(dim=(0, 2, 3), keepdim=True)[0]
        deviation = raw.std(dim=(0, 2, 3), keepdim=True, correction=0)[0]
        self.latent_mean.copy_(mean)
        # A channel that is always the same has nothing to be scaled by.
        self.latent_deviation.copy_(torch.where(deviation > 1e-6 * mean.abs(), deviation, 1))
        self._fit_round_trip(paths.double(), self._expand(raw.float()).double())

    def _fit_round_trip(self, paths: Tensor, returned: Tensor) -> None:
        """Regress ``paths`` on what ``returned``, both [N, H, D], and keep what is left."""
        mean, center = returned.mean(dim=0), paths.mean(dim=0)
        returned, paths = returned - mean, paths - center
        power = returned.square().mean(dim=0)
        known = power > (1e-6 * mean.abs()).square()
        slope = torch.where(known, (returned * paths).mean(dim=0) / torch.where(known, power, 1), 0)
        self.slope.copy_(slope)
        self.offset.copy_(center - slope * mean)
        self.rest.copy_((paths - slope * returned).square().mean(dim=0).sqrt())

    def encode(self, paths: Tensor) -> Tensor:
        """Return the latent [B, C, h, w] of ``paths`` [B, H, D]: the mean of the posterior."""
        raw = self._compress(paths)
        return (raw - self.latent_mean) / self.latent_deviation

    def decode(self, latent: Tensor, noise: Tensor) -> Tensor:
        """Return the paths [B, H, D] of ``latent`` [B, C, h, w].

        Args:
            latent: Latents.
            noise: Standard normal numbers [B, H, D]; zeros leave what the round trip loses out.
        """
        raw = latent * self.latent_deviation + self.latent_mean
        paths = self._expand(raw)
        return self.slope * paths + self.offset + noise * self.rest

    def _compress(self, paths: Tensor) -> Tensor:
        """Return raw latents [B, D·c, h, w]."""
        images = self._image.to_image(paths / self.factor).flatten(0, 1).unsqueeze(1)
        images = images.expand(-1, self.network.config.in_channels, -1, -1)
        found = [self.network.encode(part).latent_dist.mean for part in images.split(_CHUNK)]
        return torch.cat(found).reshape(len(paths), *self.latent_shape)

    def _expand(self, raw: Tensor) -> Tensor:
        """Return paths [B, H, D] of raw latents [B, D·c, h, w]."""
        variables = self.noise_shape[1]
        parts = raw.unflatten(1, (variables, -1)).flatten(0, 1).split(_CHUNK)
        images = torch.cat([self.network.decode(part).sample.mean(dim=1) for part in parts])
        return self._image.to_path(images.unflatten(0, (-1, variables))) * self.factor


def require_paths(paths: Tensor) -> None:
    """Raise `InputError` if an autoencoder cannot be fitted to ``paths`` [N, H, D]."""
    if len(paths) < 2:
        raise InputError(f"an autoencoder cannot be fitted to {len(paths)} paths", hint="give more")
    if not paths.isfinite().all():
        raise InputError("residual paths have values that are not finite")


def _load_kl(folder: Path) -> Any:
    """Return the ``AutoencoderKL`` in ``folder``, frozen."""
    try:
        from diffusers import AutoencoderKL  # pyright: ignore[reportPrivateImportUsage]
    except ImportError as error:
        raise UsageError(
            "an AutoencoderKL needs diffusers", hint="pip install diffusers"
        ) from error
    hint = "name a folder with the config.json and .safetensors that its save_pretrained wrote"
    sizes = folder / "config.json"
    try:
        require_input(sizes)
        kind = json.loads(sizes.read_text()).get("_class_name")
    except (InputError, OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{folder} is no folder of an AutoencoderKL: {error}", hint=hint
        ) from error
    if kind != "AutoencoderKL":
        raise ModelError(f"{folder} is the folder of {kind}, not of an AutoencoderKL", hint=hint)
    try:
        # No pickles, and nothing from the network.
        network = AutoencoderKL.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ModelError(
            f"the AutoencoderKL in {folder} cannot be read: {error}", hint=hint
        ) from error
    return network.float().requires_grad_(False).eval()
