"""Corrections of fake-tensor results that differ from real ones in layout or type.

Python's rules for fake results and the compiled operators disagree in a few places. Each is
small, but layouts and sizes follow from them through the rest of a model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowtide.memory.tracing.fake_strides import pointwise_strides, view_strides
from lowtide.memory.tracing.rnn_workspace import RNN_LAYER, with_rnn_workspace

_VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten._reshape_alias.default,
    }
)


_NORMS = frozenset(
    {
        torch.ops.aten.native_group_norm.default,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.native_batch_norm.default,
    }
)


# Positions of the input and the weight among the arguments.
_NORM_GRADIENTS = {
    torch.ops.aten.native_group_norm_backward.default: (1, 4),
    torch.ops.aten.native_layer_norm_backward.default: (1, 5),
    torch.ops.aten.native_batch_norm_backward.default: (1, 2),
}


def fix_fake_result(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return a fake-tensor result of ``func`` with the layout and type of a real one."""
    if func in _NORMS:
        return _repair_statistics(args, result)
    if func in _NORM_GRADIENTS:
        return _repair_gradients(func, args, result)
    if func is RNN_LAYER:
        return with_rnn_workspace(args, result)
    if not isinstance(result, Tensor) or not hasattr(result, "fake_mode"):
        return result
    if 1 not in result.shape or result.numel() == 0:
        return result
    if func in _VIEWS:
        source = args[0]
        strides = view_strides(source.shape, source.stride(), result.shape)
    elif _is_pointwise(func):
        strides = pointwise_strides(args, result)
    else:
        return result
    if strides is None or tuple(strides) == result.stride():
        return result
    return result.as_strided(result.shape, strides, result.storage_offset())


def _repair_statistics(args: tuple[Any, ...], result: Any) -> Any:
    """Convert means and deviations to the weights' type.

    Only where that is wider than the input's type.
    """
    weight = next((arg for arg in args[1:] if isinstance(arg, Tensor)), None)
    values, mean, deviation = result
    if weight is None or not hasattr(mean, "fake_mode") or mean.dtype == weight.dtype:
        return result
    return values, mean.to(weight.dtype), deviation.to(weight.dtype)


def _repair_gradients(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Give gradients the types of their tensors, also where these are mixed."""
    image, weight = (args[index] for index in _NORM_GRADIENTS[func])
    owners = image, image if weight is None else weight, image if weight is None else weight
    return tuple(
        part.to(owner.dtype) if hasattr(part, "fake_mode") and part.dtype != owner.dtype else part
        for part, owner in zip(result, owners, strict=True)
    )


@functools.cache
def _is_pointwise(func: Any) -> bool:
    """Return whether TensorIterator lays out the result.

    Copies follow another rule.
    """
    copies = any(argument.name == "memory_format" for argument in func._schema.arguments)
    return torch.Tag.pointwise in func.tags and not func._schema.is_mutable and not copies
