"""Strides of real tensors where fake tensors get other ones.

The stride of a dim of size 1 is arbitrary, and PyTorch's Python rules choose another one than the
compiled rules. Whether a tensor counts as channels-last depends on it, and with that the layout
and the copies of every later convolution and normalization.
"""

from __future__ import annotations

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
