"""How much work an operator is, beside keeping what it makes."""

from __future__ import annotations

from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.rule import op_name

# The place of the weights, and the dimension of these that belongs to the result.
_WEIGHTED = {
    "conv2d": (1, 0),
    "upsample_conv2d": (1, 0),
    "convolution": (1, 0),
    "linear": (1, 0),
    "addmm": (2, 1),
}
_UNKNOWN = 1 << 30


def macs_per_element(program: StreamProgram, node: Node) -> int:
    """Products that are summed for one number of the result; a lot where that is not known."""
    place, kept = _WEIGHTED.get(op_name(node.target), (0, 0))
    if not place or not isinstance(weight := node.args[place], NodeRef):
        return _UNKNOWN
    like = program.graph.nodes[weight.node].like
    return like.count // like.shape[kept]
