"""Copies that are made for their order alone, and are then only looked at to be copied once more.

Models put queries, keys and values from tokens into channels, those into windows and those into
heads, and each time ask for a tensor in the order of its dimensions. Where a view of the first
order does as well, the copy between is spared: the last one is the same, number by number.
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
    """Copies that may be left out: each path from them leads, through views that a tensor in the
    former order has too, to another copy that stays."""
    users = graph.users()
    found, stays = set[int](), set[int]()
    for node in graph.nodes:
        if not _is_ordering(node) or node.index in stays or node.index == graph.output:
            continue
        ends = _ends(graph, node, users)
        if ends:
            found.add(node.index)
            stays.update(ends)
    return found


def _is_ordering(node: Node) -> bool:
    plain = torch.contiguous_format
    return op_name(node.target) == "clone" and node.kwargs.get("memory_format") is plain


def _ends(graph: Graph, copy: Node, users: dict[int, list[Node]]) -> set[int]:
    """The copies that its paths end in; none if one of them ends otherwise."""
    ends = set[int]()
    waiting = [(copy, _uncopied(graph, copy))]
    while waiting:
        node, seen = waiting.pop()
        if seen is None or node.index == graph.output:
            return set()
        for user in users.get(node.index, []):
            if _is_ordering(user):
                ends.add(user.index)
            elif op_name(user.target) in _VIEWS:
                waiting.append((user, _looked(user, seen)))
            else:
                return set()
    return ends


def _uncopied(graph: Graph, copy: Node) -> Tensor | None:
    """What is copied, as it lies in memory if what it is a view of lies in order."""
    path = list(_path(graph, copy))
    seen: Tensor | None = torch.empty(path[-1].like.shape, device="meta")
    for node in reversed(path[:-1]):
        seen = None if seen is None else _looked(node, seen)
    return seen


def _path(graph: Graph, copy: Node) -> Iterator[Node]:
    """From what is copied back to what it is a view of."""
    node = graph.nodes[copy.args[0].node]
    yield node
    while op_name(node.target) in _VIEWS:
        node = graph.nodes[node.args[0].node]
        yield node


def _looked(node: Node, seen: Tensor) -> Tensor | None:
    """The view of a tensor, or None where there is none without a copy."""
    assert node.target is not None
    try:
        return node.target(seen, *node.args[1:], **node.kwargs)
    except RuntimeError:  # a view across memory that does not lie so
        return None
