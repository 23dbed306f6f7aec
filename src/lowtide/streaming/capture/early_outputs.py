"""Operators that only further results need, run as soon as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import fx


def compute_outputs_early(graph: fx.Graph) -> None:
    """Move operators that the first result does not need to where their last argument is made.

    A module that returns what its layers keep for the next call often cuts it to size at its end.
    In a run by bands all that would be held until then, and is written out at once here.
    """
    *_, output = graph.nodes
    results = cast("Sequence[Any]", output.args[0])
    needed = _needed_for(results[:1])
    # By node that others follow, its place, and the last of those that follow it.
    places = {node: place for place, node in enumerate(graph.nodes)}
    followed, ends = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in [*graph.nodes]:
        if node in needed or node.op != "call_function" or not node.all_input_nodes:
            continue
        arguments = [followed.get(one) or one for one in node.all_input_nodes]
        last = max(arguments, key=lambda one: places[one])
        if last.op != "placeholder":
            ends.get(last, last).append(node)
            followed[node], ends[last] = last, node


def _needed_for(results: Sequence[object]) -> set[fx.Node]:
    """Return the nodes that results depend on, themselves included."""
    found, left = set[fx.Node](), [one for one in results if isinstance(one, fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
