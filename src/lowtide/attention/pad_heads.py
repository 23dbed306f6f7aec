"""Zero padding of attention heads to a width that CPU kernels are fast at."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.linear_ops import Layer


def pad_heads(qkv: Layer, proj: Layer, heads: int, padding: int) -> tuple[Layer, Layer]:
    """Pad each head of an attention's projections with ``padding`` zero channels.

    Zeros add nothing to scores, and the zeros of the values meet zeros in ``proj``: exact up to
    rounding.

    Args:
        qkv: the fused projection to queries, keys and values, in this order.
        proj: the output projection.
        heads: number of heads.
        padding: channels to add to each head.

    Returns:
        The padded ``qkv`` and ``proj``.
    """
    weight, bias = qkv
    columns = proj[0].unflatten(1, (heads, -1))
    wider = None if bias is None else _padded(bias, heads, padding)
    return (_padded(weight, heads, padding), wider), (
        F.pad(columns, (0, padding)).flatten(1),
        proj[1],
    )


def _padded(tensor: Tensor, heads: int, more: int) -> Tensor:
    """Append ``more`` zeros to each head of (3 · heads · head dim, ...)."""
    each = tensor.reshape(3, heads, tensor.shape[0] // (3 * heads), -1)
    return F.pad(each, (0, 0, 0, more)).reshape(-1, *tensor.shape[1:])
