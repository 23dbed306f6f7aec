"""Multiply-add (MAC) counts of a trace: matrix products, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.memory.tracing.trace import Trace

_aten = torch.ops.aten


def multiply_adds(trace: Trace, phases: Collection[str] | None = None) -> int:
    """Count the multiply-adds of the matrix products, convolutions and attention.

    With ``phases`` only operators of these marked phases count. Elementwise operators are left
    out, since their time depends on the bytes they move. The counts follow the operators'
    definitions, whatever the kernels do.
    """
    return sum(
        op.repeats * multiply_adds_of(op.call)
        for number, op in enumerate(trace.ops)
        if op.call is not None and (phases is None or trace.phase(number) in phases)
    )


def multiply_adds_of(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> int:
    """Count the multiply-adds of one operator call.

    0 for all but matrix products, convolutions and attention.
    """
    count = _MAC_COUNTERS.get(call[0])
    return 0 if count is None else count(call[1])


def _matmul(left: Any, right: Any) -> int:
    """Count multiply-adds of (..., rows, inner) times (..., inner, columns)."""
    return math.prod(left.shape) * right.shape[-1]


def _convolution(args: tuple[Any, ...]) -> int:
    image, kernel, _, stride, padding, dilation, transposed = args[:7]
    if transposed:
        # A transposed convolution multiplies each pixel of its input by the whole kernel.
        return image.shape[0] * math.prod(image.shape[2:]) * math.prod(kernel.shape)
    sides = zip(
        image.shape[2:],
        kernel.shape[2:],
        _per_dim(stride, image),
        _per_dim(padding, image),
        _per_dim(dilation, image),
        strict=True,
    )
    pixels = math.prod(
        (side + 2 * pad - gap * (width - 1) - 1) // step + 1
        for side, width, step, pad, gap in sides
    )
    return image.shape[0] * pixels * math.prod(kernel.shape)


def _per_dim(setting: Any, image: Any) -> tuple[int, ...]:
    """Expand a setting to one value per spatial dim."""
    return setting if len(setting) > 1 else setting * (len(image.shape) - 2)


def _convolution_backward(args: tuple[Any, ...]) -> int:
    gradient, image, kernel = args[:3]
    transposed, output_mask = args[7], args[10]
    pixels = math.prod((image if transposed else gradient).shape[2:])
    return (output_mask[0] + output_mask[1]) * image.shape[0] * pixels * math.prod(kernel.shape)


def _attention(query: Any, key: Any, value: Any) -> int:
    """Count multiply-adds of the scores and of their product with the values."""
    rows = math.prod(query.shape[:-1])
    return rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(query: Any, key: Any, value: Any) -> int:
    """Count multiply-adds of the recomputed scores and the gradients' four products."""
    rows = math.prod(query.shape[:-1])
    return rows * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_ATTENTION = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
_MAC_COUNTERS: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten.mm.default: lambda args: _matmul(args[0], args[1]),
    _aten.bmm.default: lambda args: _matmul(args[0], args[1]),
    _aten.addmm.default: lambda args: _matmul(args[1], args[2]),
    _aten.baddbmm.default: lambda args: _matmul(args[1], args[2]),
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
if ONEDNN_LINEAR is not None:
    _MAC_COUNTERS[ONEDNN_LINEAR] = lambda args: math.prod(args[0].shape) * args[1].shape[0]
# Not every release has all of these operators.
for _name in _ATTENTION:
    if hasattr(_aten, f"_scaled_dot_product_{_name}"):
        _forward = getattr(_aten, f"_scaled_dot_product_{_name}").default
        _backward = getattr(_aten, f"_scaled_dot_product_{_name}_backward").default
        _MAC_COUNTERS[_forward] = lambda args: _attention(*args[:3])
        _MAC_COUNTERS[_backward] = lambda args: _attention_backward(*args[1:4])
