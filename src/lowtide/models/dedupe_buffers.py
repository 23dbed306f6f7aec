"""Deduplication of equal buffers in a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Smaller ones save nothing, and counters that training changes are among them.
_LEAST_BYTES = 64 << 10


@torch.no_grad()
def share_equal_buffers(module: nn.Module) -> None:
    """Let equal buffers of ``module``, which is not trained, share one tensor.

    Window transformers hold the position indices and the mask of shifted windows once per block:
    more than half of what a DRCT of 14 million parameters takes. Results are bit-identical. Moving
    or casting the module separates them again.
    """
    known: dict[object, list[Tensor]] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if type(buffer) is not Tensor or buffer.nbytes < _LEAST_BYTES or buffer.is_meta:
                continue
            alike = known.setdefault((buffer.dtype, buffer.device, buffer.shape), [])
            for other in alike:
                if other is buffer or _are_same(other, buffer):
                    part._buffers[name] = other
                    break
            else:
                alike.append(buffer)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Compare bits and strides: 0 and -0 differ, and a NaN is equal to itself."""
    if one.stride() != other.stride() or not one.is_contiguous():
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
