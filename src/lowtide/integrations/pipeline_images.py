"""Images of a pipeline: PIL images, arrays and tensors, as float32 arrays and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import InputError, UsageError
from lowtide.models.denoiser.slim_unet_config import NOISY_RANGE

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    Image = PILImage | np.ndarray | Tensor
else:
    Image = Any


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
