"""Graphs of `torch.export` made functional, without a second trace where that is possible.

`run_decompositions` makes operators functional that write into their inputs, and splits some
composite ones, in a second trace that takes longer than the export. Most graphs write only into
tensors of their own and have few such composites, which are rewritten here to what the trace makes
of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from lowtide.streaming.capture.graph import op_name
from lowtide.streaming.capture.in_place_writes import (
    InPlaceWrites,
    is_composite,
    is_view,
    is_write,
)

_ATEN = torch.ops.aten
# Composite operators that a trace leaves as they are.
_KEPT = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("linear", "matmul", "einsum", "scaled_dot_product_attention", "softmax", "var"),
        *("layer_norm", "group_norm", "rms_norm", "instance_norm", "prelu"),
        *(
            "pad",
            "repeat_interleave",
            "meshgrid",
            "avg_pool2d",
            "max_pool2d",
            "adaptive_avg_pool2d",
        ),
        *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "type_as"),
    }
)
# Operators of tensors that a trace turns into constants.
_CONSTANTS = frozenset({"lift", "lift_fresh"})


def functional_graph(exported: Any) -> Any:
    """Return an exported program whose operators are functional, as after `run_decompositions`."""
    graph: fx.Graph = exported.graph
    known = all(
        node.op in ("placeholder", "output") or _is_known(node) or is_write(node)
        for node in graph.nodes
    )
    if not known or not (writes := InPlaceWrites(exported)).are_replaceable():
        return exported.run_decompositions({})
    writes.replace()
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        if rewrite := _REWRITES.get(op_name(node.target)):
            rewrite(node)
        elif is_composite_view(node.target):
            _expand_view(node)
    graph.eliminate_dead_code()
    return exported


def _is_known(node: fx.Node) -> bool:
    """Return whether a node is a functional call that a trace leaves as it is, or as rewritten."""
    if node.op != "call_function":
        return False
    if op_name(node.target) == "to" and node.target is not _ATEN.to.dtype:
        return _is_same(node)  # mostly to the device where it is
    return _is_known_operator(node.target)


@functools.cache
def _is_known_operator(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    name = op_name(target)
    composite = is_composite(target)
    if name in _CONSTANTS:
        return False
    return not composite or name in _KEPT or name in _REWRITES or is_composite_view(target)


def is_composite_view(target: Any) -> bool:
    """Return whether an operator is made of other views, and returns one: none is kept."""
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    single = len(returns) == 1 and str(returns[0].type) == "Tensor"
    return single and op_name(target) not in _KEPT and is_view(target) and is_composite(target)


def _expand_view(node: fx.Node) -> None:
    """Replace a composite view by the views that it is made of, found by a trace of it alone."""
    given = node.all_input_nodes

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        own = dict(zip(given, tensors, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), own.__getitem__)
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    parts = [*make_fx(call)(*map(_value, given)).graph.nodes]
    places = dict(zip(parts, given, strict=False))
    *before, last = [one for one in parts if one.op == "call_function"] or [None]
    if last is None:
        _drop(node)
        return
    for part in before:
        with node.graph.inserting_before(node):
            places[part] = node.graph.node_copy(part, places.__getitem__)
        places[part].meta = {**node.meta, "val": _value(part)}
    # The last one keeps the name, which a signature may have.
    node.target = last.target
    node.args, node.kwargs = map_arg((last.args, last.kwargs), places.__getitem__)


def _is_same(node: fx.Node) -> bool:
    """Return whether the result of a call is like its first argument, in memory too."""
    made, given = _value(node), _value(node.args[0])
    return all(
        getattr(made, name) == getattr(given, name) for name in ("shape", "dtype", "device")
    ) and (made.stride() == given.stride())


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


def _drop(node: fx.Node) -> bool:
    """Drop a call that changes nothing. Return whether it changes nothing."""
    if not _is_same(node):
        return False
    if any(user.op == "output" for user in node.users):
        # A signature names the results, so that this one stays, as a copy.
        node.target, node.args, node.kwargs = _ATEN.clone.default, node.args[:1], {}
    else:
        node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
        node.graph.erase_node(node)
    return True


def _convert(node: fx.Node) -> None:
    if not _drop(node) and node.target is _ATEN.to.dtype:
        node.target, node.kwargs = _ATEN._to_copy.default, {"dtype": _value(node).dtype}
        node.args = node.args[:1]


def _drop_dropout(node: fx.Node) -> None:
    if not node.args[2]:
        _drop(node)


def _make_contiguous(node: fx.Node) -> None:
    if not _drop(node):
        memory_format = node.kwargs.get("memory_format", torch.contiguous_format)
        node.target, node.kwargs = _ATEN.clone.default, {"memory_format": memory_format}
        node.args = node.args[:1]


def _expand(node: fx.Node) -> None:
    node.target = _ATEN.expand.default
    node.args = node.args[0], [*_value(node).shape]


def _reshape(node: fx.Node) -> None:
    """Rewrite a reshape to a view, of a contiguous copy where the strides need one."""
    given, shape = node.args[0], [*_value(node).shape]
    assert isinstance(given, fx.Node)
    if op_name(node.target) == "reshape":
        shape = node.args[1]
    node.target, node.kwargs = _ATEN.view.default, {}
    try:
        _value(given).view(_value(node).shape)
    except (RuntimeError, ValueError):
        with node.graph.inserting_before(node):
            kept: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copied = node.graph.call_function(_ATEN.clone.default, (given,), kept)
        copied.meta = {**node.meta, "val": _value(given).contiguous()}
        node.target, given = _ATEN._unsafe_view.default, copied
        shape = [*_value(node).shape]
    node.args = given, shape


def _copy_constant(node: fx.Node) -> None:
    node.target = _ATEN.clone.default


_REWRITES: dict[str, Callable[[fx.Node], None]] = {
    "to": _convert,
    "dropout": _drop_dropout,
    "feature_dropout": _drop_dropout,
    "contiguous": _make_contiguous,
    "expand_as": _expand,
    "reshape": _reshape,
    "flatten": _reshape,
    "lift_fresh_copy": _copy_constant,
    "chunk": lambda node: None,  # its pieces are slices in `OperatorGraph`
}


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
