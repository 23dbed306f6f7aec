"""Forms of pointwise operators that put their result into the memory of an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.bands.graph import Graph, Node, Ref, binder, refs
from lowtide.streaming.bands.rows import Run
from lowtide.streaming.bands.rules.rule import short
from lowtide.streaming.bands.spans import Span

# Of two factors, or of two summands, either may be the one that is changed.
_EITHER = {"add", "mul"}


def over_inputs(node: Node, inputs: Sequence[int], run: Run, graph: Graph) -> dict[int, Run]:
    """By input a form of ``run`` that puts the result into that input's memory.

    It does what ``run`` does where the memory is not wholly that input's, or where the result
    would lie in another order than that of ``run``.
    """
    target = _changing(node)
    if target is None or not node.args or any(True for _ in refs(node.kwargs)):
        return {}
    found = {}
    for place in (0, 1) if _symmetric(node) else (0,):
        ref = node.args[place]
        if isinstance(ref, Ref) and ref.node in inputs and graph.nodes[ref.node].like == node.like:
            found[ref.node] = _over(node, target, inputs, place, run)
    return found


def _changing(node: Node) -> Any:
    """The operator that changes its first argument, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    packet = getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)
    if target.namespace != "aten" or packet is None:
        return None
    if target._overloadname not in packet.overloads():
        return None
    found = getattr(packet, target._overloadname)
    if _arguments(found) != _arguments(target):
        return None
    changed = found._schema.arguments[0].alias_info
    return found if changed is not None and changed.is_write else None


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in target._schema.arguments]


def _symmetric(node: Node) -> bool:
    plain = len(node.args) == 2 and not node.kwargs
    return short(node.target) in _EITHER and plain and isinstance(node.args[1], Ref)


def _over(node: Node, target: Any, inputs: Sequence[int], place: int, run: Run) -> Run:
    args = node.args if place == 0 else (node.args[1], node.args[0])
    bind, kwargs = binder(args), node.kwargs
    wholes = [one for one in node.refs if one not in inputs]

    def over(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        changed, *rest = bind(values)
        fits = changed.numel() * changed.itemsize == changed.untyped_storage().nbytes()
        if not fits or (place and changed.stride() != rest[0].stride()):
            return run(span, pieces, whole)
        return target(changed, *rest, **kwargs)

    return over
