"""Denoising as a pipeline of diffusers.

Its images are PIL images, arrays and tensors, as float32 arrays and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import InputError, UsageError
from lowtide.integrations.denoiser_model import DenoiserModel, DenoiseScheduler
from lowtide.integrations.diffusers_bases import BaseOutput, DiffusionPipeline
from lowtide.models.denoiser.denoiser import Denoiser, require_sigma
from lowtide.models.denoiser.noise_level import LEAST_SIGMA, NoiseLevel
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    NoiseModel,
    PoissonGaussianNoise,
    network_terms,
)
from lowtide.models.denoiser.slim_unet_config import NOISY_RANGE
from lowtide.models.loader import load

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    Image = PILImage | np.ndarray | Tensor
else:
    Image = Any

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


def as_arrays(images: Image | Sequence[Image], channels: int) -> list[np.ndarray]:
    """Return images as float32 arrays (H, W, C) in 0..1, C being 1, 3 or ``channels``.

    Noise takes floats beyond 0..1: as those of files, they are clipped to `NOISY_RANGE`.

    Raises:
        UsageError: An image is of another type, shape or bit depth.
        InputError: A value is not finite.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    arrays = [one for image in several for one in _arrays_of(image)]
    for array in arrays:
        usable = array.shape[2] in ({1, 3} if channels in (1, 3) else {channels})
        if not usable or 0 in array.shape:
            raise UsageError(
                f"an image of {'×'.join(map(str, array.shape))} (height, width, channels) does not"
                f" suit a network of {channels} channels",
                hint="arrays are (H, W, C) or (B, H, W, C), tensors (C, H, W) or (B, C, H, W)",
            )
        if not np.isfinite(array).all():
            raise InputError(
                f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite"
            )
    return [array.clip(*NOISY_RANGE) for array in arrays]


def as_output(images: list[np.ndarray], kind: Literal["pil", "np", "pt"]) -> Any:
    """Return images (H, W, C) as PIL images, an array (B, H, W, C) or a tensor (B, C, H, W).

    Raises `UsageError` for another kind, and for images of several shapes in one array.
    """
    if kind == "pil":
        return [_to_pil(one) for one in images]
    if kind not in ("np", "pt"):
        raise UsageError(f"output_type {kind!r} is not one of pil, np, pt")
    if len({one.shape for one in images}) > 1:
        raise UsageError("images of several shapes make no array", hint='output_type="pil"')
    array = np.stack(images)
    return array if kind == "np" else torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()


def _arrays_of(image: Any) -> list[np.ndarray]:
    if isinstance(image, Tensor):
        array = image.detach().cpu()
        array = _floats(array.float().numpy() if array.is_floating_point() else array.numpy())
        array = np.moveaxis(array[None] if array.ndim == 3 else array, 1, -1)
    elif isinstance(image, np.ndarray):
        array = _floats(image)
        array = array[None] if array.ndim == 3 else array
    else:
        array = _from_pil(image)[None]
    return [np.ascontiguousarray(one) for one in array]


def _floats(array: np.ndarray) -> np.ndarray:
    if array.ndim not in (3, 4):
        raise UsageError(
            f"an image has 3 dimensions and a batch has 4, not {array.ndim}",
            hint="arrays are (H, W, C) or (B, H, W, C), tensors (C, H, W) or (B, C, H, W)",
        )
    if array.dtype.kind != "f":
        raise UsageError(
            f"values are floats in 0..1, not {array.dtype}", hint="divide by the largest value"
        )
    return array.astype(np.float32)


def _from_pil(image: Any) -> np.ndarray:
    mode = getattr(image, "mode", None)
    if mode not in ("L", "RGB"):
        what = f"an image of mode {mode}" if mode else f"a {type(image).__name__}"
        raise UsageError(
            f"{what} is not gray or RGB with 8 bits",
            hint="image.convert('RGB'); lowtide.denoise takes alpha and 16 bits",
        )
    array = np.asarray(image)
    array = array if array.ndim == 3 else array[..., None]
    return array * np.float32(1 / 255)


def _to_pil(image: np.ndarray) -> PILImage:
    from PIL.Image import fromarray

    samples = np.rint(image.clip(0, 1) * np.float32(255)).astype(np.uint8)
    return fromarray(samples[..., 0] if samples.shape[2] == 1 else samples)
