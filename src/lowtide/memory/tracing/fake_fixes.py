"""Corrections of fake-tensor results that differ from real ones in layout or type.

Python's rules for fake results and the compiled operators disagree in a few places. Each is
small, but layouts and sizes follow from them through the rest of a model.

The stride of a dim of size 1 is arbitrary, and PyTorch's Python rules choose another one than the
compiled rules. Whether a tensor counts as channels-last depends on it, and with that the layout
and the copies of every later convolution and normalization.

The workspace that oneDNN's recurrent layers keep for the backward pass is a result of the operator,
as large as all states and gates of all steps. PyTorch's rule leaves it empty, so that estimates
would miss it, and a backward pass that is measured with an empty one would read beyond its end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def view_strides(
    shape: Sequence[int], stride: Sequence[int], target: Sequence[int]
) -> list[int] | None:
    """Return the strides of a view with ``target`` sizes; None if no view is possible.

    Follows ``computeStride`` of PyTorch's ATen/TensorUtils.cpp: the old dims are joined
    into runs of contiguous memory from the last to the first, and each new dim takes its
    stride from the run that it falls into.
    """
    strides = [0] * len(target)
    position = len(target) - 1
    base = stride[-1] if stride else 1
    run = joined = 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        ends = dim == 0 or (shape[dim - 1] != 1 and stride[dim - 1] != run * base)
        if not ends:
            continue
        while position >= 0 and (joined < run or target[position] == 1):
            strides[position] = joined * base
            joined *= target[position]
            position -= 1
        if joined != run:
            return None
        if dim > 0:
            base, run, joined = stride[dim - 1], 1, 1
    return strides if position == -1 else None


def pointwise_strides(operands: Sequence[Any], result: Tensor) -> list[int] | None:
    """Return the strides of an elementwise operator's new result; None to keep them.

    Operands of any shape are broadcast to that of ``result``. Follows ``TensorIterator`` of
    PyTorch's ATen: equal layouts are kept; otherwise dims are sorted by the operands' strides, ties
    by size, and the result is dense in that order.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if any(tensor.dim() > result.dim() for tensor in tensors) or not tensors:
        return None
    numbers = any(isinstance(operand, int | float) for operand in operands[:2])
    if not numbers and all(tensor.shape == result.shape for tensor in tensors):
        if all(tensor.is_contiguous() for tensor in tensors):
            return dense_strides(result.shape, range(result.dim() - 1, -1, -1))
        if (
            all(
                tensor.is_contiguous(memory_format=torch.channels_last)
                for tensor in tensors
                if tensor.dim() == 4
            )
            and result.dim() == 4
        ):
            return dense_strides(result.shape, (1, 3, 2, 0))
        if len({tensor.stride() for tensor in tensors}) == 1:
            first = tensors[0]
            return list(first.stride()) if _is_dense(first) else None
    order = _order(result.shape, [_broadcast_strides(tensor, result) for tensor in tensors])
    return dense_strides(result.shape, order)


def _broadcast_strides(tensor: Tensor, result: Tensor) -> list[int]:
    """Return an operand's strides along the result's dims, 0 where it is broadcast."""
    missing = result.dim() - tensor.dim()
    own = [
        0 if size == 1 and result.shape[missing + dim] != 1 else tensor.stride(dim)
        for dim, size in enumerate(tensor.shape)
    ]
    return [0] * missing + own


def _order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Sort dims from the fastest to the slowest, by insertion sort as TensorIterator."""
    order = list(range(len(shape) - 1, -1, -1))
    for last in range(1, len(order)):
        position = last
        for other in range(last - 1, -1, -1):
            verdict = _compare(order[other], order[position], shape, strides)
            if verdict > 0:
                order[other], order[position] = order[position], order[other]
                position = other
            elif verdict < 0:
                break
    return order


def _compare(one: int, two: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    for operand in strides:
        if operand[one] == 0 or operand[two] == 0:
            continue
        if operand[one] != operand[two]:
            return -1 if operand[one] < operand[two] else 1
        if shape[one] > shape[two]:
            return 1
    return 0


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return strides without gaps for dims in ``order``, fastest to slowest."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


# Absent from builds without oneDNN.
RNN_LAYER: Any = getattr(getattr(torch.ops.aten, "mkldnn_rnn_layer", None), "default", None)
RNN_LAYER_BACKWARD: Any = getattr(
    getattr(torch.ops.aten, "mkldnn_rnn_layer_backward", None), "default", None
)

# Enough bytes for a linear fit: parts of the workspace are whole pages, which a few steps of small
# layers do not fill.
_MIN_FIT_BYTES = 4 << 20
_STEP_BYTES = 32  # approximate bytes per element of a step's states and gates


def with_rnn_workspace(args: tuple[Any, ...], result: Any) -> Any:
    """Return the fake result of `RNN_LAYER` with a workspace of its real size.

    There is a workspace wherever gradients are enabled.
    """
    output, hidden, cell, workspace = result
    if not torch.is_grad_enabled() or not hasattr(workspace, "fake_mode"):
        return result
    image, *others = args[:7]
    shapes = tuple(tuple(tensor.shape) for tensor in others)
    size = _workspace_bytes(tuple(image.shape), shapes, image.dtype, args[7], *args[9:15])
    return output, hidden, cell, workspace.new_empty(size)


@functools.lru_cache(256)
def _workspace_bytes(
    image: tuple[int, ...],
    others: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    reverse: bool,
    *settings: Any,
) -> int:
    """Return the workspace bytes of a real layer, extrapolated linearly from a few steps.

    Half of them or less may never be written, and so not be resident; they count all the same.
    """

    def run(steps: int) -> int:
        shapes = (steps, *image[1:]), *others
        # Bypasses all dispatch modes: no trace may see a real run.
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
            inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
            workspace = RNN_LAYER(*inputs, reverse, (), *settings, True)[3]
        return workspace.untyped_storage().nbytes()

    steps, few = image[0], math.ceil(_MIN_FIT_BYTES / (_STEP_BYTES * math.prod(others[-1])))
    if steps <= 2 * few:
        return run(steps)
    low, high = run(few), run(2 * few)
    return high + math.ceil((high - low) / few * (steps - 2 * few))


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
