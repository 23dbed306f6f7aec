"""Operators of a graph that write into their first argument, replaced by functional ones.

As PyTorch's functionalization does it in a second trace: a write into a view of a tensor becomes a
new tensor, of which later users see their views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from lowtide.streaming.capture.graph import op_name

_ATEN = torch.ops.aten
# By view of a part, the operator that writes the part back into a copy of the whole; by view of
# all, the operator that undoes it.
_SCATTERS: dict[Any, Any] = {
    _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
    _ATEN.select.int: _ATEN.select_scatter.default,
}
_INVERSES: dict[Any, Any] = {_ATEN.unsqueeze.default: _ATEN.squeeze.dim}


class InPlaceWrites:
    """The writes of a graph: whether they can be replaced, and their replacement.

    Tensors that share memory are recognized by their storage: fake views share that of their base.
    """

    def __init__(self, exported: Any) -> None:
        self._graph: fx.Graph = exported.graph
        self._signature = exported.graph_signature
        writes = [node for node in self._graph.nodes if is_write(node)]
        self._written = {_storage(node.args[0].meta["val"]) for node in writes}
        # By storage the node that makes it, then what its tensors are now, and how often it was
        # written until then.
        self._roots: dict[int, fx.Node] = {}
        self._now: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._writes: dict[int, int] = {}
        # By write, its functional operator and that operator's result.
        self._functional: dict[fx.Node, tuple[Any, Tensor]] = {}
        self._made = set[fx.Node]()

    def are_replaceable(self) -> bool:
        """Return whether each write has a functional form, into memory made in the graph."""
        return all(self._is_replaceable(node) for node in self._graph.nodes)

    def _is_replaceable(self, node: fx.Node) -> bool:
        if node.op == "output":
            return True
        value = node.meta.get("val")
        storages = {_storage(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
        if not storages & self._written:
            # A view shares its storage; only composite operators such as `reshape` may also copy.
            reads = any(map(self._is_written, node.all_input_nodes))
            return not reads or not is_view(node.target) or is_composite(node.target)
        (storage,) = storages if len(storages) == 1 else (None,)
        if storage is None or not isinstance(value, Tensor) or node.op != "call_function":
            return False
        if storage not in self._roots:
            self._roots[storage] = node
            return not is_write(node)
        given = node.args[0]
        if not isinstance(given, fx.Node) or not self._is_written(given):
            return False
        if is_write(node):
            return self._find_functional(node)
        return is_view(node.target)

    def _find_functional(self, node: fx.Node) -> bool:
        """Note the functional form of a write; return whether it gives what the write leaves."""
        target: Any = node.target
        packet = getattr(_ATEN, op_name(target).removesuffix("_"), None)
        functional = getattr(packet, target._overloadname, None)
        written, (args, kwargs) = self._base(node), _values((node.args, node.kwargs))
        value: Any = written.meta["val"]
        if functional is None:
            return False
        with value.fake_mode:
            made = functional(*args, **kwargs)
        self._functional[node] = functional, made
        if (made.shape, made.dtype) != (value.shape, value.dtype):
            return False
        # Strides decide which later calls copy, and must be those that were traced.
        root = self._roots[_storage(value)].meta["val"]
        view = self._view_of(written)
        if view is None:
            return made.stride() == root.stride()
        while view is not None and view.target in {*_SCATTERS, *_INVERSES}:
            view = self._view_of(self._base(view))
        return view is None and _is_dense(root)

    def replace(self) -> None:
        """Replace all writes. Only for a graph in which they `are_replaceable`."""
        for node in [*self._graph.nodes]:
            if node in self._functional:
                self._write(node)
            elif not self._is_written(node) or self._is_root(node):
                before = node.all_input_nodes
                node.args, node.kwargs = map_arg(
                    (node.args, node.kwargs), lambda one, user=node: self._current(one, user)
                )
                if node.op == "output":
                    self._rename_results(before, node.all_input_nodes)
        for node in reversed([*self._graph.nodes]):
            if self._is_written(node) and not node.users and node not in self._made:
                self._graph.erase_node(node)

    def _rename_results(self, before: list[fx.Node], after: list[fx.Node]) -> None:
        for old, new in zip(before, after, strict=True):
            if old is not new:
                self._signature.replace_all_uses(old.name, new.name)

    def _write(self, node: fx.Node) -> None:
        written = self._seen_through(self._base(node))
        functional, made = self._functional[node]
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: self._current(one, node))
        value = result = self._add(node, functional, args, kwargs, made)
        view = self._view_of(written)
        while view is not None:
            base = self._base(view)
            whole = self._current(base, node)
            target, args = _INVERSES.get(view.target), (value, *view.args[1:])
            if target is None:
                target, args = _SCATTERS[view.target], (whole, *args)
            value = self._add(node, target, args, view.kwargs, whole.meta["val"])
            view = self._view_of(base)
        storage = _storage(written.meta["val"])
        self._writes[storage] = count = self._writes.get(storage, 0) + 1
        if made.stride() == written.meta["val"].stride():
            self._now[written] = result, count
        self._now[self._roots[storage]] = value, count

    def _seen_through(self, node: fx.Node) -> fx.Node:
        """Return the tensor that a write returns, which is the one that it writes into."""
        while node in self._functional:
            node = self._base(node)
        return node

    def _is_root(self, node: fx.Node) -> bool:
        return self._roots.get(_storage(node.meta["val"])) is node

    def _view_of(self, node: fx.Node) -> fx.Node | None:
        """Return the view that a node is; None for the whole of its memory."""
        node = self._seen_through(node)
        return None if self._is_root(node) else node

    def _base(self, node: fx.Node) -> fx.Node:
        base = node.args[0]
        assert isinstance(base, fx.Node)
        return base

    def _current(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Return what a tensor is now, for a node that is not yet computed."""
        if not self._is_written(node):
            return node
        node = self._seen_through(node)
        count = self._writes.get(_storage(node.meta["val"]), 0)
        now, seen = self._now.get(node, (node, 0))
        if seen != count:
            args = self._current(self._base(node), user), *node.args[1:]
            now = self._add(user, node.target, args, node.kwargs, node.meta["val"])
            self._now[node] = now, count
        return now

    def _is_written(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and _storage(value) in self._written

    def _add(self, where: fx.Node, target: Any, args: Any, kwargs: Any, value: Tensor) -> fx.Node:
        with self._graph.inserting_before(where):
            made = self._graph.call_function(target, tuple(args), dict(kwargs))
        made.meta = {**where.meta, "val": value}
        self._made.add(made)
        return made


def is_write(node: fx.Node) -> bool:
    """Return whether a node is an operator that writes into its first argument alone."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    return any(written) and written.index(True) == 0 and sum(written) == 1


def is_composite(target: Any) -> bool:
    """Return whether an operator is made of others, also where a graph is functional."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )


def is_view(target: Any) -> bool:
    """Return whether an operator returns a view of its argument."""
    return isinstance(target, torch._ops.OpOverload) and any(
        one.alias_info is not None for one in target._schema.returns
    )


def _values(tree: Any) -> Any:
    return map_arg(tree, lambda one: one.meta["val"])


def _is_dense(value: Tensor) -> bool:
    """Return whether a copy has the same strides."""
    return torch.empty_like(value).stride() == value.stride()


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata
