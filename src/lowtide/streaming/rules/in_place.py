"""In-place and ``out=`` forms of pointwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import Graph, Node, NodeRef, bind_refs, iter_refs
from lowtide.streaming.rules.row_op import OutRun, Run
from lowtide.streaming.rules.rule import op_name, owns_full_storage
from lowtide.streaming.rules.sum_layout import is_commutative, match_strides
from lowtide.streaming.spans import Span

# Operators whose ``out=`` kernels write to any strides. Those of others make a further copy, and
# oneDNN's GELU treats every output as contiguous.
STRIDED_OUT_OPS = {
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


def in_place_runs(
    node: Node, inputs: Sequence[int], run: Run, graph: Graph, *, contiguous: bool = False
) -> dict[int, Run]:
    """Return forms of ``run`` that write the result into an input's memory, by input.

    A form falls back to ``run`` where the input does not occupy all of its storage, or where the
    result would have other strides than that of ``run``: those of the first operand, or contiguous
    ones if ``contiguous``.

    Args:
        node: Pointwise node.
        inputs: Nodes of its inputs with rows.
        run: Out-of-place form.
        graph: Graph of the node.
        contiguous: Whether the result is contiguous.
    """
    target = _in_place_overload(node)
    if target is None or not node.args or any(True for _ in iter_refs(node.kwargs)):
        return {}
    found = {}
    for position in (0, 1) if is_commutative(node) else (0,):
        ref = node.args[position]
        if (
            isinstance(ref, NodeRef)
            and ref.node in inputs
            and graph.nodes[ref.node].meta == node.meta
        ):
            found[ref.node] = _in_place_run(node, target, inputs, position, run, contiguous)
    return found


def out_run(node: Node, inputs: Sequence[int]) -> OutRun | None:
    """Return an ``out=`` form for a tensor of any strides; None if there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or any(True for _ in iter_refs(node.kwargs)):
        return None
    packet = target.overloadpacket
    if op_name(target) not in STRIDED_OUT_OPS or "out" not in packet.overloads():
        return None
    out_overload = packet.out
    if _schema_arguments(out_overload)[:-1] != _schema_arguments(target):
        return None
    bind, kwargs = bind_refs(node.args), node.kwargs
    full_inputs = [one for one in node.refs if one not in inputs]

    def into(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor], out: Tensor) -> object:
        values = dict(zip((*inputs, *full_inputs), (*pieces, *whole), strict=True))
        return out_overload(*bind(values), **kwargs, out=out)

    return into


def _in_place_overload(node: Node) -> Any:
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
    if _schema_arguments(found) != _schema_arguments(target):
        return None
    changed = found._schema.arguments[0].alias_info
    return found if changed is not None and changed.is_write else None


def _schema_arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in target._schema.arguments]


def _in_place_run(
    node: Node, target: Any, inputs: Sequence[int], position: int, run: Run, contiguous: bool
) -> Run:
    args = node.args if position == 0 else (node.args[1], node.args[0])
    bind, kwargs = bind_refs(args), node.kwargs
    full_inputs = [one for one in node.refs if one not in inputs]

    def over(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values = dict(zip((*inputs, *full_inputs), (*pieces, *whole), strict=True))
        changed, *rest = bind(values)
        fits = owns_full_storage(changed)
        if contiguous:
            fits = fits and changed.is_contiguous()
            rest = [match_strides(changed, one) for one in rest] if fits else rest
        elif position:
            fits = fits and changed.stride() == rest[0].stride()
        return target(changed, *rest, **kwargs) if fits else run(span, pieces, whole)

    return over
