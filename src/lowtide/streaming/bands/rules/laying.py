"""In which order sums of pixels and tokens lie in memory.

Where a network goes from an image to tokens, it adds what lies channel after channel to what lies
token after token. PyTorch's sum lies as the first of both, so everything up to the next
convolution mixes the two orders, and every norm puts its input in order for itself. Here a sum
that a norm reads lies token after token, and a convolution after it gets its input channel after
channel, as in a whole run: the other order rounds up to eight times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.attention.layouts import in_order
from lowtide.streaming.bands.graph import Graph, Node, Ref, binder
from lowtide.streaming.bands.rows import Run
from lowtide.streaming.bands.rules.rule import short
from lowtide.streaming.bands.spans import Span

# Through which a result is looked at: the same memory, or a copy in the same order.
_VIEWS = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "unsqueeze", "squeeze", "slice", "contiguous",
}  # fmt: skip
_EITHER = {"add", "mul"}


def is_symmetric(node: Node) -> bool:
    """Whether the two operands may be swapped."""
    plain = len(node.args) == 2 and not node.kwargs
    return (
        short(node.target) in _EITHER and plain
        and all(isinstance(arg, Ref) for arg in node.args)
    )  # fmt: skip


def plain_sums(graph: Graph) -> set[int]:
    """Sums that a norm over their last dimension reads: they are tokens."""
    users = graph.users()
    return {
        node.index for node in graph.nodes
        if node.kind == "call" and is_symmetric(node) and _is_normed(node, users)
    }  # fmt: skip


def _is_normed(node: Node, users: dict[int, list[Node]]) -> bool:
    waiting = [node.index]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            name = short(user.target)
            if name == "layer_norm":
                return True
            if name in _VIEWS:
                waiting.append(user.index)
    return False


def plainly(node: Node, inputs: Sequence[int]) -> Run:
    """A symmetric operator, its result in the order of its dimensions."""
    target, wholes = node.target, [one for one in node.refs if one not in inputs]
    bind = binder(node.args)
    assert target is not None

    def laid(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values: dict[int, Any] = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        one, other = bind(values)
        # It lies as its first operand does.
        if other.is_contiguous():
            one, other = other, one
        return in_order(target(one, alongside(one, other)))

    return laid


def alongside(tensor: Tensor, other: Tensor) -> Tensor:
    """``other``, which is to be added to ``tensor``, in the order in which that lies: PyTorch adds
    up what lies otherwise number by number, three times as long as by a copy of it."""
    alike = other.shape == tensor.shape and tensor.is_contiguous()
    return in_order(other) if alike else other
