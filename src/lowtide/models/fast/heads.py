"""The layers before and after an attention, with heads as wide as kernels on a CPU want them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.attention.products import Layer, linear_in_any_order
from lowtide.attention.wide_heads import wide_heads
from lowtide.attention.windowed import kernel_width
from lowtide.models.fast.part import recorded
from lowtide.models.fast.tokens import FastLinear, added


class Heads:
    """``qkv`` and ``proj`` of an attention of spandrel's, for one image or more of its windows.

    Where it pays, heads get channels of zeros: those of queries and keys add nothing to scores, and
    those of values meet zeros in ``proj``. Results differ by rounding at most.
    """

    def __init__(self, attention: Any, like: Tensor) -> None:
        self._attention = attention
        more = _channels_more(attention, like)
        self._wider = _wider(attention, more) if more else None

    def split(self, x: Tensor) -> Tensor:
        """(..., channels) to (..., 3, heads, channels of a head)."""
        attention, wider = self._attention, self._wider
        found = linear_in_any_order(x, *wider[0]) if wider else attention.qkv(x)
        return found.unflatten(-1, (3, attention.num_heads, -1))

    def join(self, found: Tensor, plus: Tensor | None = None) -> Tensor:
        """(..., heads · channels of a head) to (..., channels), ``plus`` what is there already."""
        if self._wider is not None:
            return linear_in_any_order(found, *self._wider[1], plus=plus)
        return added(self._attention.proj, found, plus)


def _channels_more(attention: Any, like: Tensor) -> int:
    """By how many channels of zeros each head grows, none where layers are not plain or a gradient
    is recorded."""
    qkv, proj = attention.qkv, attention.proj
    plain = type(qkv) is type(proj) is FastLinear and like.device.type == "cpu"
    if not plain or recorded() or not like.dtype == qkv.weight.dtype == torch.float32:
        return 0
    width = proj.weight.shape[1] // attention.num_heads
    return kernel_width(width) - width


def _wider(attention: Any, more: int) -> tuple[Layer, Layer]:
    """Weights and bias of both layers with these channels."""
    qkv, proj = attention.qkv, attention.proj
    return wide_heads((qkv.weight, qkv.bias), (proj.weight, proj.bias), attention.num_heads, more)
