"""Zero padding of attention heads to a width that CPU kernels are fast at."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.linear_ops import Layer


def pad_heads(into: Layer, out_of: Layer, heads: int, more: int) -> tuple[Layer, Layer]:
    """Pad each head of an attention's projections with ``more`` zero channels.

    Zeros add nothing to scores, and the zeros of the values meet zeros in ``out_of``: exact up to
    rounding.

    Args:
        into: the fused projection to queries, keys and values, in this order.
        out_of: the output projection.
        heads: number of heads.
        more: channels to add to each head.

    Returns:
        The padded ``into`` and ``out_of``.
    """
    weight, bias = into
    columns = out_of[0].unflatten(1, (heads, -1))
    wider = None if bias is None else _padded(bias, heads, more)
    return (_padded(weight, heads, more), wider), (F.pad(columns, (0, more)).flatten(1), out_of[1])


def _padded(tensor: Tensor, heads: int, more: int) -> Tensor:
    """Append ``more`` zeros to each head of (3 · heads · D, ...)."""
    each = tensor.reshape(3, heads, tensor.shape[0] // (3 * heads), -1)
    return F.pad(each, (0, 0, 0, more)).reshape(-1, *tensor.shape[1:])
