"""QKV and output projections of attention with head dims padded for CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.attention.linear_ops import Layer, onednn_linear_any_layout
from lowtide.attention.pad_heads import pad_heads
from lowtide.attention.window_attention import padded_head_dim
from lowtide.models.optimized.optimized_module import is_recorded
from lowtide.models.optimized.token_linear import OptimizedLinear, linear_add


class PaddedHeads:
    """The ``qkv`` and ``proj`` layers of a spandrel attention, with padded heads.

    Built for one or more images, or for some of their windows. Where it pays, heads get channels of
    zeros: those of queries and keys add nothing to scores, and those of values meet zeros in
    ``proj``. Results differ by rounding at most.
    """

    def __init__(self, attention: Any, like: Tensor) -> None:
        self._attention = attention
        more = _channels_more(attention, like)
        self._padded_layers = _wider(attention, more) if more else None

    def split(self, x: Tensor) -> Tensor:
        """Apply ``qkv``: (..., C) to (..., 3, heads, head dim)."""
        attention, wider = self._attention, self._padded_layers
        found = onednn_linear_any_layout(x, *wider[0]) if wider else attention.qkv(x)
        return found.unflatten(-1, (3, attention.num_heads, -1))

    def join(self, found: Tensor, plus: Tensor | None = None) -> Tensor:
        """Apply ``proj``: (..., heads · head dim) to (..., C), adding ``plus`` where given."""
        if self._padded_layers is not None:
            return onednn_linear_any_layout(found, *self._padded_layers[1], plus=plus)
        return linear_add(self._attention.proj, found, plus)


def _channels_more(attention: Any, like: Tensor) -> int:
    """Return how many zero channels each head gets.

    0 where the layers are not plain linear layers or a gradient is recorded.
    """
    qkv, proj = attention.qkv, attention.proj
    plain = type(qkv) is type(proj) is OptimizedLinear and like.device.type == "cpu"
    if not plain or is_recorded() or not like.dtype == qkv.weight.dtype == torch.float32:
        return 0
    width = proj.weight.shape[1] // attention.num_heads
    return padded_head_dim(width) - width


def _wider(attention: Any, more: int) -> tuple[Layer, Layer]:
    """Return weight and bias of both layers, padded by ``more`` channels per head."""
    qkv, proj = attention.qkv, attention.proj
    return pad_heads((qkv.weight, qkv.bias), (proj.weight, proj.bias), attention.num_heads, more)
