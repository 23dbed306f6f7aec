"""Denoising as a pipeline of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from lowtide.core.errors import UsageError
from lowtide.integrations.denoiser_model import DenoiserModel, DenoiseScheduler
from lowtide.integrations.diffusers_bases import BaseOutput, DiffusionPipeline
from lowtide.integrations.pipeline_images import Image, as_arrays, as_output
from lowtide.models.denoiser.denoiser import Denoiser, require_sigma
from lowtide.models.denoiser.noise_level import LEAST_SIGMA, NoiseLevel
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
    network_terms,
)
from lowtide.models.loader import load

# Models of noise that one number tells enough about.
_FROM_SIGMA = GaussianNoise.name, PoissonGaussianNoise.name


@dataclass
class DenoisePipelineOutput(BaseOutput):
    """Clean images, and the noise level of each in levels of 255.

    A level is None where the image does not tell it; it is returned unchanged then, and below half
    a level too.
    """

    images: Any
    sigmas: list[float | None]


class DenoisePipeline(DiffusionPipeline):
    """Denoiser that starts from the measurement, with the results of `lowtide.denoise`.

        pipe = DenoisePipeline.from_lowtide("lowtide-denoise")
        clean = pipe(noisy, num_inference_steps=4).images[0]

    Runs on whole images, one at a time; `lowtide.denoise` keeps a memory budget.
    """

    model_cpu_offload_seq = "unet"

    def __init__(self, unet: DenoiserModel, scheduler: DenoiseScheduler) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.unet: DenoiserModel
        self.scheduler: DenoiseScheduler

    @classmethod
    def from_lowtide(
        cls, model: str | Path = "lowtide-denoise", scheduler: DenoiseScheduler | None = None
    ) -> Self:
        """Make a pipeline of a denoiser by bundled name or file.

        Raises:
            ModelError: The model cannot be loaded.
            UsageError: The model is no denoiser.
        """
        denoiser = load(model).module
        if not isinstance(denoiser, Denoiser):
            raise UsageError(
                f"{model} is no denoiser that takes a noise level",
                hint="DenoisePipeline.from_lowtide('lowtide-denoise')",
            )
        unet = DenoiserModel(denoiser.config.to_dict())
        unet.unet.load_state_dict(denoiser.unet.state_dict())
        return cls(unet.eval(), scheduler or DenoiseScheduler(denoiser.config.scheduler))

    @torch.no_grad()
    def __call__(
        self,
        image: Image | Sequence[Image],
        sigma: float | None = None,
        num_inference_steps: int = 1,
        generator: torch.Generator | None = None,
        seed: int = 0,
        noise: NoiseModel | None = None,
        output_type: Literal["pil", "np", "pt"] = "pil",
    ) -> DenoisePipelineOutput:
        """Remove the noise of images.

        Args:
            image: One or several: PIL images, gray or RGB with 8 bits; arrays (H, W, C) or (B, H,
                W, C) and tensors (C, H, W) or (B, C, H, W) of floats in 0..1.
            sigma: Standard deviation of the noise in levels of 255. Default: estimated from each.
            num_inference_steps: Runs of the network. One gives the expected image, more give
                sharper ones.
            generator: Draws the seed, a new one for each call. Default: ``seed``.
            seed: Seed of the noise that steps add, as ``--seed`` of ``lowtide denoise``.
            noise: The noise, instead of ``sigma``: such as ``load_noise("camera.json").at(800)``.
            output_type: PIL images, an array (B, H, W, C) or a tensor (B, C, H, W) in 0..1.

        Raises:
            UsageError: An argument is invalid, or images have no channels that the network takes.
            InputError: Values are not finite, or of another range.
        """
        known = self._known_noise(sigma, noise)
        if not 0 <= seed < 2**63:
            raise UsageError(f"a seed is 0 to {2**63 - 1}, not {seed}")
        # What is wrong is refused before anything runs.
        self.scheduler.steps(1.0, num_inference_steps, self.unet.sizes.prediction)
        if generator is not None:
            made = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            seed = int(made)
        noisy = as_arrays(image, self.unet.sizes.channels)
        found = [known or _estimate(one) for one in noisy]
        images = []
        runs = len(noisy) * num_inference_steps
        with self.progress_bar(total=runs) as bar:  # pyright: ignore[reportCallIssue]
            for one, its in zip(noisy, found, strict=True):
                if its is None or its.level < LEAST_SIGMA:
                    images.append(one)
                    bar.update(num_inference_steps)
                else:
                    clean = self._sample(one, its, num_inference_steps, seed, bar)
                    images.append(clean.clip(0, 1))
        levels = [None if its is None else round(its.level * 255, 2) for its in found]
        return DenoisePipelineOutput(as_output(images, output_type), levels)

    def _known_noise(self, sigma: float | None, noise: NoiseModel | None) -> NoiseModel | None:
        """Return the noise of all images, None where each is to be estimated."""
        sizes = self.unet.sizes
        if sigma is not None and noise is not None:
            raise UsageError("sigma and noise both say how strong the noise is", hint="drop one")
        if noise is None and (sizes.noise_sha256 or sizes.noise_model not in _FROM_SIGMA):
            raise UsageError(
                f"this model was trained with {sizes.noise_model} noise, and needs its parameters",
                hint="noise=load_noise('camera.json').at(iso)",
            )
        if sigma is None:
            return noise
        require_sigma(sigma)
        return GaussianNoise(std=sigma / 255)

    def _sample(
        self,
        state: np.ndarray,
        noise: NoiseModel,
        count: int,
        seed: int,
        bar: Any,
    ) -> np.ndarray:
        """Return the clean image (H, W, C) of a noisy one."""
        sigma, parameters = network_terms(noise, self.unet.sizes)
        predictions: list[np.ndarray] = []
        for step in self.scheduler.steps(sigma, count, self.unet.sizes.prediction):
            clean = self._predict(state, step.sigma, parameters)
            earlier = predictions[: len(step.earlier)]
            state = step.advance(state, clean, earlier, seed=seed, first=0)
            predictions = [clean, *earlier]
            bar.update()
        return state

    def _predict(self, state: np.ndarray, sigma: float, parameters: Sequence[float]) -> np.ndarray:
        """Return the network's clean image (H, W, C).

        Gray runs through a color network as equal channels, color through a gray one channel by
        channel.
        """
        image = torch.from_numpy(state).permute(2, 0, 1)[None].to(self._execution_device)
        channels = self.unet.sizes.channels
        if channels == image.shape[1]:
            clean = self.unet(image, sigma, parameters)
        elif channels == 1:
            clean = self.unet(image.transpose(0, 1), sigma, parameters).transpose(0, 1)
        else:
            wider = image.expand(-1, channels, -1, -1)
            clean = self.unet(wider, sigma, parameters).mean(1, keepdim=True)
        return np.ascontiguousarray(clean[0].permute(1, 2, 0).cpu().numpy())


def _estimate(image: np.ndarray) -> NoiseModel | None:
    level = NoiseLevel(image.shape[2])
    level.add(image)
    return level.gaussian()
