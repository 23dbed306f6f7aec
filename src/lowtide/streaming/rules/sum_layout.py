"""Memory format of residual sums: contiguous for norms, NCHW for convolutions.

Where a network goes from an image to tokens, it adds a channels-first to a channels-last tensor.
PyTorch's sum has the strides of the first operand, so everything up to the next convolution mixes
both formats, and every norm copies its input. Here a sum that a norm reads is contiguous as
tokens, and a convolution after it gets a contiguous (NCHW) input, as in a run of the whole model:
channels-last convolutions round up to eight times as much. Where a whole run is channels-last, as
HAT's convolutions next to its attention, it stays so, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.attention.memory_format import to_contiguous
from lowtide.streaming.capture.graph import Graph, Node, NodeRef, bind_refs
from lowtide.streaming.rules.row_op import Run
from lowtide.streaming.rules.rule import RuleContext, op_name
from lowtide.streaming.spans import Span

# Operators that return a view, or a copy in the same order.
_VIEWS = {
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
    "t",
    "unsqueeze",
    "squeeze",
    "slice",
    "contiguous",
}
_RESHAPES = {"view", "reshape", "_unsafe_view", "unflatten", "contiguous"}
_COMMUTATIVE_OPS = {"add", "mul"}
# Permutation from (B, H, W, C) to (B, C, H, W).
_NHWC_TO_NCHW = [0, 3, 1, 2]
# Operators whose result has the memory format of their input.
_FORMAT_PRESERVING_OPS = {"conv2d", "gelu", "relu", "leaky_relu", "silu"}


def is_commutative(node: Node) -> bool:
    """Whether a node is an add or mul of two tensors, whose operands may be swapped."""
    plain = len(node.args) == 2 and not node.kwargs
    return (
        op_name(node.target) in _COMMUTATIVE_OPS
        and plain
        and all(isinstance(arg, NodeRef) for arg in node.args)
    )


def contiguous_sums(graph: Graph) -> set[int]:
    """Return the sums and products that a layer norm reads: these are tokens."""
    users = graph.users()
    return {
        node.index
        for node in graph.nodes
        if node.kind == "call" and is_commutative(node) and _feeds_layer_norm(node, users)
    }


def _feeds_layer_norm(node: Node, users: dict[int, list[Node]]) -> bool:
    waiting = [node.index]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            name = op_name(user.target)
            if name == "layer_norm":
                return True
            if name in _VIEWS:
                waiting.append(user.index)
    return False


def needs_contiguous_input(image: NodeRef, context: RuleContext) -> bool:
    """Whether a convolution gets this image made contiguous, whatever its strides."""
    return bool(context.contiguous_sums) and not _is_channels_last(image, context.graph)


def _is_channels_last(image: NodeRef, graph: Graph) -> bool:
    """Whether a run of the whole model treats an image as channels-last.

    That is so for tokens from a norm, or a convolution of such an image. For sums of tokens it is
    not known: a batch of one has any stride, and PyTorch decides by that too.
    """
    turned = _trace_back(image, graph, _FORMAT_PRESERVING_OPS)
    if op_name(turned.target) != "permute" or list(turned.args[1]) != _NHWC_TO_NCHW:
        return False
    return op_name(_trace_back(turned.args[0], graph, _RESHAPES).target) == "layer_norm"


def _trace_back(ref: NodeRef, graph: Graph, through: set[str]) -> Node:
    """Return the node that a result comes from through these operators.

    Only their first arguments are followed.
    """
    node = graph.nodes[ref.node]
    while op_name(node.target) in through:
        node = graph.nodes[node.args[0].node]
    return node


def contiguous_run(node: Node, inputs: Sequence[int]) -> Run:
    """Return the run of a symmetric operator with a contiguous result."""
    target, full_inputs = node.target, [one for one in node.refs if one not in inputs]
    bind = bind_refs(node.args)
    assert target is not None

    def laid(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = dict(zip((*inputs, *full_inputs), (*pieces, *whole), strict=True))
        one, other = bind(values)
        # The result has the strides of its first operand.
        if other.is_contiguous():
            one, other = other, one
        return to_contiguous(target(one, match_strides(one, other)))

    return laid


def match_strides(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``other`` with the strides of ``tensor``, to which it is added.

    Only where both have the same shape. PyTorch adds tensors of different strides element by
    element, which takes three times as long as with a copy.
    """
    same_layout = other.shape == tensor.shape and tensor.is_contiguous()
    return to_contiguous(other) if same_layout else other
