"""Calls of operators as plain data: what they take, what they may need, how they are told apart."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch

from lowtide.memory.tracing.fake_strides import dense_strides
from lowtide.memory.tracing.trace import TensorFacts

# The operator, its arguments and its keywords, with `TensorFacts` in the place of tensors.
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# An operator needs at most so many times its operands and results (a prior).
_WIDEST, WIDEST_LOW_PRECISION = 3, 6


def workspace_bound(call: Call, made: int) -> int:
    """The most that an operator may need which makes ``made`` bytes of results."""
    return (
        made
        if needs_no_workspace(call)
        else made + largest_workspace_ratio(call) * (operand_bytes(call) + made)
    )


def needs_no_workspace(call: Call) -> bool:
    """Whether an operator surely needs nothing beyond its results: elementwise, of one type."""
    types = {facts.dtype for facts in all_tensors(call) if facts.shape}
    return torch.Tag.pointwise in call[0].tags and len(types) <= 1


def largest_workspace_ratio(call: Call) -> int:
    """How many times its operands and results an operator may need at most (a prior)."""
    return WIDEST_LOW_PRECISION if is_low_precision(call) else _WIDEST


def is_low_precision(call: Call) -> bool:
    """Whether any tensor of a call has 16 bits a number."""
    return any(facts.dtype in (torch.bfloat16, torch.float16) for facts in all_tensors(call))


def operand_bytes(call: Call) -> int:
    """Bytes of an operator's tensor arguments."""
    return sum(math.prod(facts.shape) * facts.dtype.itemsize for facts in all_tensors(call))


def signature(call: Call) -> str:
    """A short name for an operator with its sizes, strides, types and settings."""
    function, args, keywords = call
    words = f"{function}|{args}|{sorted(keywords.items(), key=lambda item: item[0])}"
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def all_tensors(call: Call) -> list[TensorFacts]:
    """What is known of each tensor among an operator's arguments."""
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
    """Where the arguments of a convolution, forward or backward, are; rows are of dimension 2."""

    forward: bool
    image: TensorFacts
    kernel: TensorFacts
    settings: tuple[Any, ...]

    @property
    def rows_seen(self) -> int:
        """Rows of the image that one row of the result looks at."""
        return self.settings[2][0] * (self.kernel.shape[2] - 1) + 1

    def result_rows(self, rows: int) -> int:
        """Rows of the result for so many rows of the image."""
        stride, padding, _, transposed, extra = (
            value if isinstance(value, bool) else value[0] for value in self.settings[:5]
        )
        if transposed:
            return (rows - 1) * stride - 2 * padding + self.rows_seen + extra
        return (rows + 2 * padding - self.rows_seen) // stride + 1


def _convolution(call: Call) -> _Convolution:
    function, args, _ = call
    if function is torch.ops.aten.convolution.default:
        return _Convolution(True, args[0], args[1], args[3:])
    return _Convolution(False, args[1], args[2], args[4:])


def row_count(call: Call) -> int:
    """Rows of the image of a convolution, or of its backward."""
    return _convolution(call).image.shape[2]


def rows_seen(call: Call) -> int:
    """Rows of the image that one row of a convolution's result looks at."""
    return _convolution(call).rows_seen


def with_rows(call: Call, rows: int) -> Call:
    """A convolution (or its backward) on an image of so many rows, all else the same."""
    function, args, keywords = call
    convolution = _convolution(call)
    image = _cut(convolution.image, rows)
    if convolution.forward:
        return function, (image, *args[1:]), keywords
    gradient = _cut(args[0], convolution.result_rows(rows))
    return function, (gradient, image, *args[2:]), keywords


def _cut(facts: TensorFacts, rows: int) -> TensorFacts:
    """The first rows of an image, laid out as a tensor of its own in the same order."""
    shape = (*facts.shape[:2], rows, *facts.shape[3:])
    order = sorted(range(len(shape)), key=lambda dim: (facts.stride[dim], -dim))
    return TensorFacts(shape, tuple(dense_strides(shape, order)), facts.dtype)
