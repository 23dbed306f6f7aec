"""Operator calls as plain data: signatures, operand bytes and workspace bounds."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch

from lowtide.memory.tracing.fake_strides import dense_strides
from lowtide.memory.tracing.trace import TensorFacts

# The operator, its arguments and its keywords, with `TensorFacts` in place of tensors.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# The most workspace an operator needs, as a multiple of its operands and results (a prior).
_MAX_WORKSPACE_RATIO, MAX_WORKSPACE_RATIO_LOW_PRECISION = 3, 6
# Operators of other packages, such as convolutions that unfold windows of 3×3, are never measured.
_MAX_WORKSPACE_RATIO_FOREIGN = 12
_NAMESPACES = frozenset({"aten", "prims", "mkldnn"})
_IMAGE_DIMS = 2


def workspace_bound(call: Call, result_bytes: int) -> int:
    """Return an upper bound of an operator's bytes while it runs, results included.

    ``result_bytes`` are the bytes of those results.
    """
    return (
        result_bytes
        if needs_no_workspace(call)
        else result_bytes + largest_workspace_ratio(call) * (operand_bytes(call) + result_bytes)
    )


def needs_no_workspace(call: Call) -> bool:
    """Return whether an operator surely needs no workspace.

    True for elementwise operators on tensors of one type.
    """
    types = {facts.dtype for facts in all_tensors(call) if facts.shape}
    return torch.Tag.pointwise in call[0].tags and len(types) <= 1


def largest_workspace_ratio(call: Call) -> int:
    """Return the most workspace an operator needs, as a multiple of its tensors.

    The tensors are its operands and results; the figure is a prior.
    """
    if is_foreign(call):
        return _MAX_WORKSPACE_RATIO_FOREIGN
    low = any(facts.dtype in (torch.bfloat16, torch.float16) for facts in all_tensors(call))
    ratio = MAX_WORKSPACE_RATIO_LOW_PRECISION if low else _MAX_WORKSPACE_RATIO
    if call[0] is torch.ops.aten.convolution.default:
        sizes = call[1][1].shape[2:]
        # Small convolutions in 3D unfold their input on the CPU.
        ratio += math.prod(sizes) if len(sizes) > _IMAGE_DIMS else 0
    return ratio


def is_foreign(call: Call) -> bool:
    """Return whether an operator is not PyTorch's own."""
    return call[0].namespace not in _NAMESPACES


def operand_bytes(call: Call) -> int:
    """Return the bytes of an operator's tensor arguments."""
    return sum(math.prod(facts.shape) * facts.dtype.itemsize for facts in all_tensors(call))


def signature(call: Call) -> str:
    """Return a hash of an operator with its sizes, strides, types and settings."""
    function, args, keywords = call
    text = f"{function}|{args}|{sorted(keywords.items(), key=lambda item: item[0])}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def all_tensors(call: Call) -> list[TensorFacts]:
    """Return the `TensorFacts` of every tensor among an operator's arguments."""
    found: list[TensorFacts] = []

    def walk(value: Any) -> None:
        if isinstance(value, TensorFacts):
            found.append(value)
        elif isinstance(value, tuple):
            for part in value:
                walk(part)

    walk(call[1])
    walk(tuple(call[2].values()))
    return found


class _Convolution(NamedTuple):
    """Arguments of a convolution, forward or backward; rows are along dim 2."""

    forward: bool
    image: TensorFacts
    kernel: TensorFacts
    settings: tuple[Any, ...]

    @property
    def receptive_rows(self) -> int:
        """Height of the receptive field of one row of the result, in image rows."""
        return self.settings[2][0] * (self.kernel.shape[2] - 1) + 1

    def result_rows(self, rows: int) -> int:
        """Return the height of the result for an image of ``rows`` rows."""
        stride, padding, _, transposed, extra = (
            value if isinstance(value, bool) else value[0] for value in self.settings[:5]
        )
        if transposed:
            return (rows - 1) * stride - 2 * padding + self.receptive_rows + extra
        return (rows + 2 * padding - self.receptive_rows) // stride + 1


def _convolution(call: Call) -> _Convolution:
    function, args, _ = call
    if function is torch.ops.aten.convolution.default:
        return _Convolution(True, args[0], args[1], args[3:])
    return _Convolution(False, args[1], args[2], args[4:])


def row_count(call: Call) -> int:
    """Return the height of a convolution's image, forward or backward."""
    return _convolution(call).image.shape[2]


def receptive_rows(call: Call) -> int:
    """Return the height of a convolution's receptive field, in rows of its image."""
    return _convolution(call).receptive_rows


def with_rows(call: Call, rows: int) -> Call:
    """Return the same convolution (or its backward) on an image of ``rows`` rows."""
    function, args, keywords = call
    convolution = _convolution(call)
    image = _crop_rows(convolution.image, rows)
    if convolution.forward:
        return function, (image, *args[1:]), keywords
    gradient = _crop_rows(args[0], convolution.result_rows(rows))
    return function, (gradient, image, *args[2:]), keywords


def _crop_rows(facts: TensorFacts, rows: int) -> TensorFacts:
    """Return an image's first rows as a dense tensor with dims in the same order."""
    shape = (*facts.shape[:2], rows, *facts.shape[3:])
    order = sorted(range(len(shape)), key=lambda dim: (facts.stride[dim], -dim))
    return TensorFacts(shape, tuple(dense_strides(shape, order)), facts.dtype)
