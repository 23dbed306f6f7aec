"""In-place reuse: which steps may write their result into an input's memory.

Pointwise operators have in-place forms. Where nothing reads the input again, they give the same
values, need no memory of their own, and save a CPU from loading memory that it overwrites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import op_name
from lowtide.streaming.spans import Spans

# Operators whose results never alias an input. All others may return their input or a view of it.
_NON_ALIASING_OPS = {
    *(
        f"{name}{count}d"
        for name in ("conv", "conv_transpose", "avg_pool", "max_pool")
        for count in (1, 2, 3)
    ),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "upsample_conv2d",
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
}


def find_alias_sets(graph: Graph, steps: Mapping[int, object]) -> dict[int, int]:
    """Return by result the first one of its alias set, which may share its memory.

    Args:
        graph: Graph of the steps.
        steps: Steps by the node index of their result.
    """
    parents: dict[int, int] = {}

    def root(index: int) -> int:
        while parents.setdefault(index, index) != index:
            index = parents[index]
        return index

    for index, step in steps.items():
        if isinstance(step, RowOp) and op_name(graph.nodes[index].target) not in _NON_ALIASING_OPS:
            for one in step.inputs:
                a, b = root(one), root(index)
                parents[max(a, b)] = min(a, b)
    return {index: root(index) for index in list(parents)}


class BufferReuse:
    """Choice, band by band, of the inputs that steps of one segment may overwrite."""

    def __init__(
        self,
        steps: Mapping[int, object],
        order: Iterable[int],
        alias_sets: Mapping[int, int],
        protected: Iterable[int],
    ) -> None:
        """Find the candidates of a segment.

        Args:
            steps: Steps by the node index of their result.
            order: Steps of the segment, in order.
            alias_sets: Alias sets, as from `find_alias_sets`.
            protected: Results that must not be overwritten, nor anything that shares their memory.
        """
        self._order = {index: at for at, index in enumerate(order)}
        self._alias_sets = alias_sets
        protected_sets = {alias_sets.get(one, one) for one in protected}
        self._members: dict[int, list[int]] = {}
        for one, first in alias_sets.items():
            self._members.setdefault(first, []).append(one)
        self._choices: dict[int, list[int]] = {}
        for index in self._order:
            step = steps[index]
            if isinstance(step, RowOp) and step.in_place_runs:
                input_sets = [alias_sets.get(one, one) for one in step.inputs]
                choices = [
                    one
                    for one, first in zip(step.inputs, input_sets, strict=True)
                    if one in step.in_place_runs
                    and one in self._order
                    and first not in protected_sets
                    and input_sets.count(first) == 1
                ]
                if choices:
                    self._choices[index] = choices

    def in_place_inputs(
        self, computed: Iterable[int], last_uses: Mapping[int, int], held: Mapping[int, Spans]
    ) -> dict[int, int]:
        """Return by step the input that it may overwrite in a band.

        Args:
            computed: Steps that the band runs.
            last_uses: By result the last step of the band that reads it.
            held: By result the rows held for later bands.
        """
        found = {}
        for index in computed:
            for one in self._choices.get(index, ()):
                if self._is_last_use(index, one, last_uses, held):
                    found[index] = one
                    break
        return found

    def _is_last_use(
        self, index: int, one: int, last_uses: Mapping[int, int], held: Mapping[int, Spans]
    ) -> bool:
        at = self._order[index]
        return not any(
            held.get(other) or self._order.get(last_uses.get(other, index), at) > at
            for other in self._members.get(self._alias_sets.get(one, one), [one])
        )
