"""Pixels become tokens and back: copies of tensors into the order of their dimensions."""

from __future__ import annotations

import torch
from torch import Tensor


def to_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, as (images, ...) in order.

    On a CPU the pixels of an image and its channels change places a third to a quarter as fast as
    they could: PyTorch goes block by block through a matrix that lies the other way round, and
    number by number through anything else, a batch of one such matrix too. Here it is given one
    image after another.
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
    """(images, a, b), b those of two dimensions if these lie as one."""
    if tensor.dim() == 3:
        return tensor
    if tensor.stride(2) == tensor.stride(3) * tensor.shape[3]:
        return tensor.flatten(2)
    return None
