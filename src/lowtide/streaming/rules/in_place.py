"""In-place and ``out=`` forms of pointwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import Graph, Node, NodeRef, bind_refs, iter_refs
from lowtide.streaming.rules.row_op import Into, Run
from lowtide.streaming.rules.rule import is_all_of_its_memory, op_name
from lowtide.streaming.rules.sum_layout import is_symmetric, match_strides
from lowtide.streaming.spans import Span

# Operators whose ``out=`` kernels write to any strides. Those of others make a further copy, and
# oneDNN's GELU treats every output as contiguous.
WRITE_ANYWHERE = {
    "add",
    "sub",
    "mul",
    "div",
    "silu",
    "leaky_relu",
    "sigmoid",
    "tanh",
    "hardtanh",
    "elu",
    "hardswish",
    "clamp",
    "clamp_min",
    "mish",
}


def in_place_forms(
    node: Node, inputs: Sequence[int], run: Run, graph: Graph, *, plain: bool = False
) -> dict[int, Run]:
    """Return forms of ``run`` that write the result into an input's memory, by input.

    A form falls back to ``run`` where the input does not occupy all of its storage, or where the
    result would have other strides than that of ``run``: those of the first operand, or contiguous
    ones if ``plain``.

    Args:
        node: Pointwise node.
        inputs: Nodes of its inputs with rows.
        run: Out-of-place form.
        graph: Graph of the node.
        plain: Whether the result is contiguous.
    """
    target = _changing(node)
    if target is None or not node.args or any(True for _ in iter_refs(node.kwargs)):
        return {}
    found = {}
    for place in (0, 1) if is_symmetric(node) else (0,):
        ref = node.args[place]
        if (
            isinstance(ref, NodeRef)
            and ref.node in inputs
            and graph.nodes[ref.node].like == node.like
        ):
            found[ref.node] = _over(node, target, inputs, place, run, plain)
    return found


def out_form(node: Node, inputs: Sequence[int]) -> Into | None:
    """Return an ``out=`` form for a tensor of any strides; None if there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or any(True for _ in iter_refs(node.kwargs)):
        return None
    packet = target.overloadpacket
    if op_name(target) not in WRITE_ANYWHERE or "out" not in packet.overloads():
        return None
    writing = packet.out
    if _arguments(writing)[:-1] != _arguments(target):
        return None
    bind, kwargs = bind_refs(node.args), node.kwargs
    wholes = [one for one in node.refs if one not in inputs]

    def into(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor], out: Tensor) -> object:
        values = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        return writing(*bind(values), **kwargs, out=out)

    return into


def _changing(node: Node) -> Any:
    """Return the in-place variant of the node's operator, as ``add_`` of ``add``.

    None if there is none with the same arguments.
    """
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


def _over(node: Node, target: Any, inputs: Sequence[int], place: int, run: Run, plain: bool) -> Run:
    args = node.args if place == 0 else (node.args[1], node.args[0])
    bind, kwargs = bind_refs(args), node.kwargs
    wholes = [one for one in node.refs if one not in inputs]

    def over(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        changed, *rest = bind(values)
        fits = is_all_of_its_memory(changed)
        if plain:
            fits = fits and changed.is_contiguous()
            rest = [match_strides(changed, one) for one in rest] if fits else rest
        elif place:
            fits = fits and changed.stride() == rest[0].stride()
        return target(changed, *rest, **kwargs) if fits else run(span, pieces, whole)

    return over
