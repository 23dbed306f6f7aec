"""Memory that planning takes on a CPU, by the captured program: what it leaves, and its peak.

Both follow from the graph alone, so that a plan does not depend on what the process holds.
"""

from __future__ import annotations

import warnings

from lowtide.core.units import MIB, format_bytes
from lowtide.streaming.capture.graph import OperatorGraph

# The graph, compiled kernels and the buffers of libraries, by operator: 110 to 290 KiB on networks
# of 38 to 300 operators, with PyTorch 2.15.
_OPERATOR_BYTES = MIB // 4
# With what the heap keeps and operators work in, maps of whole runs took 1.6 to 2.5 times the bytes
# that are alive.
_MAP_COPIES = 2


def plan_kept_bytes(steps: int) -> int:
    """Return about how many bytes the plan of a program of so many steps leaves in the process.

    Libraries, which `lowtide.stream` and `lowtide.fit` load, are not among them.
    """
    return _OPERATOR_BYTES * steps


def whole_run_budget(graph: OperatorGraph) -> int:
    """Return about how many bytes a whole run of a module of this graph adds to a process."""
    return _MAP_COPIES * whole_run_bytes(graph)


def whole_run_bytes(graph: OperatorGraph) -> int:
    """Return the bytes of results alive at a time while a module of this graph runs whole."""
    # Constants that rules made of weights have places beyond the nodes.
    owners = dict[int, int]()
    for node in graph.nodes:
        is_view = getattr(node.target, "is_view", False) and node.refs
        first = node.refs[0] if is_view else node.index
        owners[node.index] = owners.get(first, first)
    last = {owners.get(one, one): node.index for node in graph.nodes for one in node.refs}
    last |= {owners[one]: len(graph.nodes) for one in graph.outputs}
    freed = dict[int, int]()
    alive = most = 0
    for node in graph.nodes:
        if node.kind == "call" and owners[node.index] == node.index:
            alive += node.meta.nbytes
            until = last.get(node.index, node.index)
            freed[until] = freed.get(until, 0) + node.meta.nbytes
        most = max(most, alive)
        alive -= freed.get(node.index, 0)
    return most


def warn_beyond(budget_bytes: int | None, needed: int, what: str) -> None:
    """Warn if ``what`` takes ``needed`` bytes once, more than the budget, which may be unknown."""
    if budget_bytes is not None and needed > budget_bytes:
        warnings.warn(
            f"{what} takes about {format_bytes(needed)}, once, more than the budget of"
            f" {format_bytes(budget_bytes)}",
            stacklevel=2,
        )
