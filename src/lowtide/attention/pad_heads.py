"""Heads with channels of zeros, as wide as kernels on a CPU want them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.linear_ops import Layer


def pad_heads(into: Layer, out_of: Layer, heads: int, more: int) -> tuple[Layer, Layer]:
    """The layers before and after an attention, with so many ``more`` channels for each head.

    ``into`` makes queries, keys and values, one after another; ``out_of`` takes what was attended
    to. Zeros add nothing to scores, and those of values meet zeros in ``out_of``: exact but for
    rounding.
    """
    weight, bias = into
    columns = out_of[0].unflatten(1, (heads, -1))
    wider = None if bias is None else _padded(bias, heads, more)
    return (_padded(weight, heads, more), wider), (F.pad(columns, (0, more)).flatten(1), out_of[1])


def _padded(tensor: Tensor, heads: int, more: int) -> Tensor:
    """(3 · heads · channels of a head, ...) with zeros after each head."""
    each = tensor.reshape(3, heads, tensor.shape[0] // (3 * heads), -1)
    return F.pad(each, (0, 0, 0, more)).reshape(-1, *tensor.shape[1:])
