"""How much work an operator is, beside keeping what it makes."""

from __future__ import annotations

from lowtide.streaming.bands.graph import Node, Ref
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.rules.rule import short

# The place of the weights, and the dimension of these that belongs to the result.
_WEIGHTED = {
    "conv2d": (1, 0),
    "conv2d_of_doubled": (1, 0),
    "convolution": (1, 0),
    "linear": (1, 0),
    "addmm": (2, 1),
}
_UNKNOWN = 1 << 30


def effort(program: Program, node: Node) -> int:
    """Products that are summed for one number of the result; a lot where that is not known."""
    place, kept = _WEIGHTED.get(short(node.target), (0, 0))
    if not place or not isinstance(weight := node.args[place], Ref):
        return _UNKNOWN
    like = program.graph.nodes[weight.node].like
    return like.count // like.shape[kept]
