"""Removal of contiguous copies that are only viewed and then copied again.

Models permute queries, keys and values from tokens to channels, then to windows, then to heads,
and make each contiguous. Where the views between two copies are possible without the first copy,
it is left out: the last copy has the same values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import Graph, Node
from lowtide.streaming.rules.rule import op_name

_VIEWS = {
    "view",
    "_unsafe_view",
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
}


def redundant_copies(graph: Graph) -> set[int]:
    """Return the copies that may be left out.

    Every path from such a copy leads, through views that are possible without it, to another copy
    that stays.
    """
    users = graph.users()
    found, stays = set[int](), set[int]()
    for node in graph.nodes:
        if not _is_contiguous_copy(node) or node.index in stays or node.index in graph.outputs:
            continue
        ends = _final_copies(graph, node, users)
        if ends:
            found.add(node.index)
            stays.update(ends)
    return found


def _is_contiguous_copy(node: Node) -> bool:
    plain = torch.contiguous_format
    return op_name(node.target) == "clone" and node.kwargs.get("memory_format") is plain


def _final_copies(graph: Graph, copy: Node, users: dict[int, list[Node]]) -> set[int]:
    """Return the copies in which all paths from ``copy`` end.

    Empty if a path ends otherwise.
    """
    ends = set[int]()
    waiting = [(copy, _view_without_copy(graph, copy))]
    while waiting:
        node, seen = waiting.pop()
        if seen is None or node.index in graph.outputs:
            return set()
        for user in users.get(node.index, []):
            if _is_contiguous_copy(user):
                ends.add(user.index)
            elif op_name(user.target) in _VIEWS:
                waiting.append((user, _apply_view(user, seen)))
            else:
                return set()
    return ends


def _view_without_copy(graph: Graph, copy: Node) -> Tensor | None:
    """Return a meta tensor with the strides of the copied view; None if unknown.

    What the view is of is taken to be contiguous.
    """
    path = list(_view_chain(graph, copy))
    seen: Tensor | None = torch.empty(path[-1].meta.shape, device="meta")
    for node in reversed(path[:-1]):
        seen = None if seen is None else _apply_view(node, seen)
    return seen


def _view_chain(graph: Graph, copy: Node) -> Iterator[Node]:
    """Yield the nodes from the input of a copy back to what it is a view of."""
    node = graph.nodes[copy.args[0].node]
    yield node
    while op_name(node.target) in _VIEWS:
        node = graph.nodes[node.args[0].node]
        yield node


def _apply_view(node: Node, tensor: Tensor) -> Tensor | None:
    """Return the node's view of a tensor, or None if it needs a copy."""
    assert node.target is not None
    try:
        return node.target(tensor, *node.args[1:], **node.kwargs)
    except RuntimeError:  # a view that these strides do not allow
        return None
