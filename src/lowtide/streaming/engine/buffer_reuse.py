"""Results that are put into the memory of what they are made of, where nothing reads that again.

Pointwise operators have forms that change their input. Those give the same numbers, take no
memory of their own, and spare a processor the fetching of what it is to overwrite anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import op_name
from lowtide.streaming.spans import Spans

# Operators whose results have memory of their own, whatever their arguments. All others may give
# their input back, or a part of it: nothing is presumed of them.
_OWN = {
    "conv2d",
    "upsample_conv2d",
    "conv_transpose2d",
    "linear",
    "addmm",
    "baddbmm",
    "matmul",
    "bmm",
    "mm",
    "scaled_dot_product_attention",
    "softmax",
    "_softmax",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "batch_norm",
    "add",
    "sub",
    "mul",
    "div",
    "relu",
    "leaky_relu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "elu",
    "mish",
    "clamp",
    "clamp_min",
    "clamp_max",
    "exp",
    "neg",
    "abs",
    "square",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "prelu",
    "softplus",
    "log_sigmoid",
    "where",
    "avg_pool2d",
    "max_pool2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
}


def buffer_families(graph: Graph, steps: Mapping[int, object]) -> dict[int, int]:
    """For each result with rows the first of those that may share its memory."""
    first: dict[int, int] = {}

    def root(index: int) -> int:
        while first.setdefault(index, index) != index:
            index = first[index]
        return index

    for index, step in steps.items():
        if isinstance(step, RowOp) and op_name(graph.nodes[index].target) not in _OWN:
            for one in step.inputs:
                a, b = root(one), root(index)
                first[max(a, b)] = min(a, b)
    return {index: root(index) for index in list(first)}


class BufferReuse:
    """Which inputs the steps of one segment may overwrite, band by band."""

    def __init__(
        self,
        steps: Mapping[int, object],
        order: Iterable[int],
        family: Mapping[int, int],
        apart: Iterable[int],
    ) -> None:
        """``order`` are the segment's steps; what shares memory with ``apart`` is left alone."""
        self._order = {index: at for at, index in enumerate(order)}
        self._family = family
        kept = {family.get(one, one) for one in apart}
        self._members: dict[int, list[int]] = {}
        for one, first in family.items():
            self._members.setdefault(first, []).append(one)
        self._choices: dict[int, list[int]] = {}
        for index in self._order:
            step = steps[index]
            if isinstance(step, RowOp) and step.over:
                own = [family.get(one, one) for one in step.inputs]
                choices = [
                    one
                    for one, first in zip(step.inputs, own, strict=True)
                    if one in step.over
                    and one in self._order
                    and first not in kept
                    and own.count(first) == 1
                ]
                if choices:
                    self._choices[index] = choices

    def of(
        self, makes: Iterable[int], uses: Mapping[int, int], holds: Mapping[int, Spans]
    ) -> dict[int, int]:
        """By step the input whose memory it may have in a band."""
        found = {}
        for index in makes:
            for one in self._choices.get(index, ()):
                if self._is_last(index, one, uses, holds):
                    found[index] = one
                    break
        return found

    def _is_last(
        self, index: int, one: int, uses: Mapping[int, int], holds: Mapping[int, Spans]
    ) -> bool:
        at = self._order[index]
        return not any(
            holds.get(other) or self._order.get(uses.get(other, index), at) > at
            for other in self._members.get(self._family.get(one, one), [one])
        )
