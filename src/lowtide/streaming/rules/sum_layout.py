"""In which order sums of pixels and tokens lie in memory.

Where a network goes from an image to tokens, it adds what lies channel after channel to what lies
token after token. PyTorch's sum lies as the first of both, so everything up to the next
convolution mixes the two orders, and every norm puts its input in order for itself. Here a sum
that a norm reads lies token after token, and a convolution after it gets its input channel after
channel, as in a whole run: the other order rounds up to eight times as much. Where a whole run has
that order, as of HAT's convolutions beside its attention, it stays, and nothing is copied.
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

# Through which a result is looked at: the same memory, or a copy in the same order.
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
_EITHER = {"add", "mul"}
# From (images, height, width, channels).
_TO_IMAGE = [0, 3, 1, 2]
# Whose result lies as their image does.
_KEEPING = {"conv2d", "gelu", "relu", "leaky_relu", "silu"}


def is_symmetric(node: Node) -> bool:
    """Whether the two operands may be swapped."""
    plain = len(node.args) == 2 and not node.kwargs
    return (
        op_name(node.target) in _EITHER
        and plain
        and all(isinstance(arg, NodeRef) for arg in node.args)
    )


def contiguous_sums(graph: Graph) -> set[int]:
    """Sums that a norm over their last dimension reads: they are tokens."""
    users = graph.users()
    return {
        node.index
        for node in graph.nodes
        if node.kind == "call" and is_symmetric(node) and _is_normed(node, users)
    }


def _is_normed(node: Node, users: dict[int, list[Node]]) -> bool:
    waiting = [node.index]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            name = op_name(user.target)
            if name == "layer_norm":
                return True
            if name in _VIEWS:
                waiting.append(user.index)
    return False


def is_made_contiguous(image: NodeRef, tracked: RuleContext) -> bool:
    """Whether a convolution gets this image channel after channel, however it lies."""
    return bool(tracked.plain) and not _has_channels_together(image, tracked.graph)


def _has_channels_together(image: NodeRef, graph: Graph) -> bool:
    """Whether kernels of a whole run take an image for one of channels last: it is of tokens that a
    norm made, or of a convolution of such an image.

    Of sums of tokens it is not known, whose batch of one has any stride: PyTorch goes by that too.
    """
    turned = _source(image, graph, _KEEPING)
    if op_name(turned.target) != "permute" or list(turned.args[1]) != _TO_IMAGE:
        return False
    return op_name(_source(turned.args[0], graph, _RESHAPES).target) == "layer_norm"


def _source(ref: NodeRef, graph: Graph, through: set[str]) -> Node:
    """What a result was made of by these operators, each of its first argument."""
    node = graph.nodes[ref.node]
    while op_name(node.target) in through:
        node = graph.nodes[node.args[0].node]
    return node


def contiguous_form(node: Node, inputs: Sequence[int]) -> Run:
    """A symmetric operator, its result in the order of its dimensions."""
    target, wholes = node.target, [one for one in node.refs if one not in inputs]
    bind = bind_refs(node.args)
    assert target is not None

    def laid(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        one, other = bind(values)
        # It lies as its first operand does.
        if other.is_contiguous():
            one, other = other, one
        return to_contiguous(target(one, match_strides(one, other)))

    return laid


def match_strides(tensor: Tensor, other: Tensor) -> Tensor:
    """``other``, which is to be added to ``tensor``, in the order in which that lies: PyTorch adds
    up what lies otherwise number by number, three times as long as by a copy of it."""
    alike = other.shape == tensor.shape and tensor.is_contiguous()
    return to_contiguous(other) if alike else other
