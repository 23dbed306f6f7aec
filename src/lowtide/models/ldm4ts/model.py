"""LDM4TS: a latent diffusion of standardized residual paths, given the look-back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.core.errors import InputError, NotFiniteError, UsageError
from lowtide.core.philox import philox_generator
from lowtide.models.ldm4ts.autoencoder import PatchAutoencoder, build_autoencoder
from lowtide.models.ldm4ts.conditioning import LookBackEncoder
from lowtide.models.ldm4ts.config import (
    LDM4TSConfig,
    load_state,
    make_config,
    read_model,
    write_model,
)
from lowtide.models.ldm4ts.latent_sampler import GaussianLatent, ScheduleAngles, sample_latents
from lowtide.models.ldm4ts.unet import AttentionChoice, LatentUNet

# Samples that are drawn at once, so that memory does not grow with their number. Every chunk has
# as many, so that a sample has the same bits among few and many.
_CHUNK = 16
_PURPOSE = 0x6C646D  # "ldm", in the keys of generators


class LDM4TSModel(nn.Module):
    """Sampler of standardized residual paths [H, D], jointly, given the look-back [L, D].

    Paths become images, these the latents of a frozen autoencoder, and a U-Net learns what a
    Gaussian of the latents lacks: other shapes, and how they depend on the look-back. Without any
    training, samples have the variance of the paths that the autoencoder was fitted to.

    Args:
        image_size: Height and width of the path image, in pixels.
        horizons: Steps ahead; paths are as long as the longest.
        diffusion_steps: Noise levels in training; they cost no memory.
        device: Where the model is made; by default PyTorch's default device.
        attention_backend: ``"default"`` or ``"sdpa"``, PyTorch's fused attention, ``"flash"``, or
            ``"sage"``, which is for inference. Fused SDPA replaces packages that are not
            installed, with a note.
        enable_gradient_checkpointing: Recompute activations in the backward pass of training.
        sizes: The other fields of `LDM4TSConfig`.

    Attributes:
        config: Sizes and parts.
        autoencoder: The frozen autoencoder.
        gaussian: Gaussian of the latents, fitted by `fit_autoencoder`.
        strength: Factor () of what the U-Net adds to it outside training, 1 before `fit_strength`.

    Raises:
        UsageError: A field is unknown or has a value that makes no model.
    """

    strength: Tensor

    def __init__(
        self,
        image_size: tuple[int, int] = (64, 64),
        horizons: tuple[int, ...] | list[int] = (96,),
        diffusion_steps: int = 1000,
        device: torch.device | str | None = None,
        attention_backend: str = "default",
        enable_gradient_checkpointing: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.config = config = make_config(
            image_size=image_size,
            horizons=horizons,
            diffusion_steps=diffusion_steps,
            attention_backend=attention_backend,
            gradient_checkpointing=enable_gradient_checkpointing,
            **sizes,
        )
        place = torch.get_default_device() if device is None else torch.device(device)
        self._attention = choice = AttentionChoice(config.attention_backend, place, config.head_dim)
        self.autoencoder = build_autoencoder(config)
        self.autoencoder.requires_grad_(False)
        self.angles = ScheduleAngles(config.diffusion_steps)
        self.gaussian = GaussianLatent(self.latent_shape)
        self.register_buffer("strength", torch.ones(()))
        self.encoder: LookBackEncoder | None = None
        self.unet: LatentUNet | None = None
        if config.diffusion:
            # Apart, so that neither the weights nor the caller's random numbers change.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                self.encoder = LookBackEncoder(config, self.latent_shape[1:], choice)
                self.unet = LatentUNet(
                    self.latent_shape,
                    config.width,
                    self.encoder.map_channels,
                    self.encoder.vector_size,
                    config.diffusion_steps,
                    choice,
                    attention_tokens=config.attention_tokens,
                    checkpointing=config.gradient_checkpointing,
                )
        if device is not None:
            self.to(place)
        if choice.is_inference_only:
            self.eval()

    @property
    def notes(self) -> list[str]:
        """What is not as asked for: attention backends that cannot run."""
        return self._attention.notes

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent."""
        return self.autoencoder.latent_shape

    def train(self, mode: bool = True) -> LDM4TSModel:
        """Switch to training; raises `UsageError` if the attention has no backward pass."""
        if mode:
            self._attention.require_gradients()
        super().train(mode)
        self.autoencoder.eval()
        return self

    @torch.no_grad()
    def fit_autoencoder(self, paths: Tensor) -> None:
        """Fit the autoencoder and the Gaussian of its latents, in closed form.

        Args:
            paths: Standardized residual paths [N, H, D].
        """
        self._require_paths(paths)
        self.autoencoder.fit(paths)
        parts = [self.autoencoder.encode(part) for part in paths.split(256)]
        self.gaussian.fit(torch.cat(parts))

    @torch.no_grad()
    def encode(self, paths: Tensor) -> Tensor:
        """Map paths [B, H, D] to latents [B, C, h, w]."""
        self._require_paths(paths)
        return self.autoencoder.encode(paths)

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """Return velocities [B, C, h, w].

        Args:
            noisy: Noisy latents [B, C, h, w].
            time: Their times [B], integers from 0 to ``diffusion_steps`` - 1.
            context: Look-backs [B, L, D], in any units.
        """
        self._require_context(context)
        features = None if self.encoder is None else self.encoder(context)
        return self._velocity(noisy, time, features)

    def denoising_loss(self, context: Tensor, paths: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the mean squared error of velocities, a scalar.

        Args:
            context: Look-backs [B, L, D].
            paths: The standardized residual paths [B, H, D] that followed.
            noise: Standard normal numbers [B, C, h, w].
            time: Times [B], integers from 0 to ``diffusion_steps`` - 1.
        """
        if self.unet is None:
            raise UsageError("without diffusion there is nothing to train", hint="diffusion=True")
        latent = self.encode(paths)
        cosine, sine = self.angles.of(time, latent)
        velocity = self(cosine * latent + sine * noise, time, context)
        return self.velocity_error(velocity, cosine * noise - sine * latent)

    def velocity_error(self, velocity: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean squared error of velocities [B, C, h, w], a scalar.

        With the closed-form autoencoder it is the error of the paths that they become, so that
        components of a path count as much as they vary; with another that of the latents.
        """
        if isinstance(self.autoencoder, PatchAutoencoder):
            velocity, wanted = (self._path(one.float()) for one in (velocity, wanted))
        return (velocity.float() - wanted.float()).square().mean()

    @torch.no_grad()
    def fit_strength(self, context: Tensor, paths: Tensor, noise: Tensor, time: Tensor) -> float:
        """Set how much of the U-Net counts to what is best for windows that it has not seen.

        Windows are few and look alike, so that a U-Net soon knows by heart what followed those it
        was trained on. The least squares, in units of the paths, of the velocity's error over the
        factor are between 0, the Gaussian alone, and 1.

        Args:
            context: Look-backs [B, L, D].
            paths: Paths, noise and times as for `denoising_loss`.
            noise: Standard normal numbers [B, C, h, w].
            time: Times [B].

        Returns:
            The factor, which is in `strength`.
        """
        self._require_context(context)
        if self.unet is None:
            return float(self.strength)
        self.strength.fill_(1)
        along, power = 0.0, 0.0
        for rows in torch.arange(len(context)).split(_CHUNK):
            latent = self.encode(paths[rows])
            cosine, sine = self.angles.of(time[rows], latent)
            noisy = cosine * latent + sine * noise[rows]
            usual = self.gaussian.velocity(noisy, cosine, sine)
            wanted = cosine * noise[rows] - sine * latent
            usual, added, wanted = (
                self._path(one).double()
                for one in (usual, self(noisy, time[rows], context[rows]), wanted)
            )
            along += float(((added - usual) * (wanted - usual)).sum())
            power += float((added - usual).square().sum())
        self.strength.fill_(min(max(along / power, 0.0), 1.0) if power else 1.0)
        return float(self.strength)

    @torch.no_grad()
    def sample_residuals(
        self,
        context: Tensor | np.ndarray,
        samples: int,
        *,
        seed: int,
        key: int = 0,
        steps: int | None = None,
    ) -> Tensor:
        """Return residual paths [samples, H, D] of one window, float32 on the CPU.

        They depend on the window, ``seed`` and ``key`` alone, and the first of many are those of
        few. Beyond the result, memory does not grow with their number.

        Args:
            context: Look-back [L, D] of the window, in any units.
            samples: Number of paths.
            seed: Seed, at least 0.
            key: Number of the window, at least 0: others have other random numbers.
            steps: Steps of the sampler, by default those of the configuration; one is the mean.

        Raises:
            UsageError: An argument is out of range.
            NotFiniteError: The network returned NaN or infinity.
        """
        steps = self.config.sampling_steps if steps is None else steps
        if samples < 1 or not 1 <= steps <= self.config.diffusion_steps:
            raise UsageError(
                f"{samples} samples in {steps} steps cannot be drawn",
                hint=f"at least 1 sample, and 1 to {self.config.diffusion_steps} steps",
            )
        device = self.gaussian.basis.device
        window = torch.as_tensor(context, dtype=torch.float32, device=device)[None]
        self._require_context(window)
        features = None
        if self.encoder is not None:
            features = tuple(one.expand(_CHUNK, *one.shape[1:]) for one in self.encoder(window))
        result = torch.empty(samples, self.config.horizon, self.config.variables)
        for start in range(0, samples, _CHUNK):
            draw = philox_generator(seed, _PURPOSE, key, start)
            noise, fine = (
                torch.from_numpy(draw.standard_normal((_CHUNK, *shape), np.float32)).to(device)
                for shape in (self.latent_shape, self.autoencoder.noise_shape)
            )
            latents = sample_latents(
                noise,
                lambda noisy, time: self._velocity(noisy, time, features),
                self.angles,
                self.gaussian,
                steps,
            )
            part = result[start : start + _CHUNK]
            part.copy_(self.autoencoder.decode(latents, fine)[: len(part)])
            if not part.isfinite().all():
                raise NotFiniteError
        return result

    def forecast(
        self, x: Tensor, samples: int, *, seed: int = 0, steps: int | None = None
    ) -> Tensor:
        """Return sample paths [samples, B, H, D] of what follows, without another forecaster.

        The center is the last value of a look-back and the scale that of a random walk with its
        steps, so that the model must have been trained with residuals standardized by these. A
        window's paths do not depend on the batch; all windows have the same random numbers.

        Args:
            x: Look-backs [B, L, D] in their own units.
            samples: Number of paths.
            seed: Seed, at least 0.
            steps: Steps of the sampler, by default those of the configuration.
        """
        self._require_context(x)
        center, scale = random_walk(x.float(), self.config.horizon)
        result = torch.empty(samples, len(x), *scale.shape[1:])
        for number, window in enumerate(x):
            drawn = self.sample_residuals(window, samples, seed=seed, steps=steps)
            result[:, number] = drawn.mul_(scale[number].cpu()).add_(center[number].cpu())
        return result

    def example_inputs(
        self, batch_size: int, image_size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs of `forward` on the model's device, for estimates of memory."""
        if tuple(image_size) != self.config.image_size:
            raise UsageError(
                f"the model is for images of {self.config.image_size}, not {tuple(image_size)}",
                hint="make it with that image_size",
            )
        device, config = self.gaussian.basis.device, self.config
        return (
            torch.zeros(batch_size, *self.latent_shape, device=device),
            torch.zeros(batch_size, dtype=torch.int64, device=device),
            torch.zeros(batch_size, config.look_back, config.variables, device=device),
        )

    def save(self, path: str | Path) -> None:
        """Write ``ldm4ts.safetensors`` and ``ldm4ts.json`` to a folder.

        Args:
            path: The folder, which is made; or a .safetensors file, beside which the configuration
                has the same name.
        """
        write_model(Path(path), self.config, self.state_dict())

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> LDM4TSModel:
        """Read a model that `save` wrote, in evaluation mode.

        Args:
            path: The folder, or the .safetensors file in it.
            device: Where the model is made.

        Raises:
            ModelError: It is none.
        """
        config, state = read_model(Path(path))
        model = cls.from_config(config, device)
        load_state(model, state, Path(path))
        return model.eval()

    @classmethod
    def from_config(
        cls, config: LDM4TSConfig, device: torch.device | str | None = None
    ) -> LDM4TSModel:
        """Make an untrained model of a configuration."""
        sizes = config.model_dump()
        return cls(
            device=device,
            enable_gradient_checkpointing=sizes.pop("gradient_checkpointing"),
            **sizes,
        )

    def _velocity(self, noisy: Tensor, time: Tensor, features: tuple[Tensor, ...] | None) -> Tensor:
        cosine, sine = self.angles.of(time, noisy)
        velocity = self.gaussian.velocity(noisy, cosine, sine)
        if self.unet is None or features is None:
            return velocity
        added = self.gaussian.inside(self.unet(noisy, time, *features))
        # In training it counts in full: it would only grow to make up for the factor.
        return velocity + (added if self.training else self.strength * added)

    def _path(self, latent: Tensor) -> Tensor:
        """Return the paths [B, H, D] of latents, without noise."""
        return self.autoencoder.decode(latent, latent.new_zeros(1, *self.autoencoder.noise_shape))

    def _require_context(self, context: Tensor) -> None:
        wanted = self.config.look_back, self.config.variables
        if context.dim() != 3 or tuple(context.shape[1:]) != wanted:
            raise UsageError(
                f"look-backs are [B, {wanted[0]}, {wanted[1]}], not {list(context.shape)}",
                hint="look_back= and variables= of the model",
            )

    def _require_paths(self, paths: Tensor) -> None:
        wanted = self.config.horizon, self.config.variables
        if paths.dim() != 3 or tuple(paths.shape[1:]) != wanted:
            raise UsageError(f"paths are [B, {wanted[0]}, {wanted[1]}], not {list(paths.shape)}")


def random_walk(x: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """Return center [B, 1, D] and scale [B, horizon, D] of what follows look-backs [B, L, D].

    Raises `InputError` for values that are not finite.
    """
    if not x.isfinite().all():
        raise InputError("a look-back has values that are not finite", hint="fill its gaps first")
    ahead = torch.arange(1, horizon + 1, device=x.device, dtype=x.dtype)
    return x[:, -1:], x.diff(dim=1).std(dim=1, correction=0)[:, None] * ahead.sqrt()[:, None]
