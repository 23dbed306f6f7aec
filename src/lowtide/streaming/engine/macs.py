"""Multiply-accumulates (MACs) per output element: the cost of recomputing."""

from __future__ import annotations

from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.rule import op_name

# Argument position of the weights, and their dim of output channels.
_WEIGHT_ARGUMENTS = {
    "conv1d": (1, 0),
    "conv2d": (1, 0),
    "conv3d": (1, 0),
    "upsample_conv2d": (1, 0),
    "convolution": (1, 0),
    "linear": (1, 0),
    "addmm": (2, 1),
}
_UNKNOWN_MACS = 1 << 30


def macs_per_element(program: StreamProgram, node: Node) -> int:
    """Return the MACs per element of a node's result; 2**30 where they are not known."""
    position, out_channels_dim = _WEIGHT_ARGUMENTS.get(op_name(node.target), (0, 0))
    if not position or not isinstance(weight := node.args[position], NodeRef):
        return _UNKNOWN_MACS
    meta = program.graph.nodes[weight.node].meta
    return meta.numel // meta.shape[out_channels_dim]
