"""Fast CPU copies between channels-first and channels-last memory."""

from __future__ import annotations

import torch
from torch import Tensor


def to_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous (B, ...), copied image by image on a CPU.

    PyTorch transposes a single 2D matrix in blocks, but copies anything else element by element,
    even a batch of one such matrix: that takes three to four times as long for the pixels and
    channels of images.
    """
    if tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.dim() not in (3, 4):
        return tensor.contiguous()
    pixels = _flat(tensor)
    if pixels is None:
        return tensor.contiguous()
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for one, given in zip(result.view(pixels.shape), pixels, strict=True):
        one.copy_(given)
    return result


def _flat(tensor: Tensor) -> Tensor | None:
    """View as (B, a, b) by merging the last two of 4 dimensions, None if impossible."""
    if tensor.dim() == 3:
        return tensor
    if tensor.stride(2) == tensor.stride(3) * tensor.shape[3]:
        return tensor.flatten(2)
    return None
