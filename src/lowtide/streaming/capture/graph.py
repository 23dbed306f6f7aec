"""A model as a list of operators, each with the results it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NodeRef:
    """The result of a node, where an argument stands."""

    node: int


@dataclass(frozen=True)
class TensorMeta:
    """Shape and type of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()

    @cached_property
    def bytes(self) -> int:
        """What it occupies."""
        return self.count * self.dtype.itemsize


@dataclass
class Node:
    """One operator of the graph, or an input of the model, or a tensor of its own.

    ``args`` and ``kwargs`` hold a `NodeRef` for each result they take; ``part`` is the part of the
    model that it is of.
    """

    index: int
    name: str
    kind: str  # "input", "tensor" or "call"
    like: TensorMeta
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    part: str = ""

    @property
    def refs(self) -> list[int]:
        """Nodes whose results this one takes, each once."""
        return list(dict.fromkeys(ref.node for ref in iter_refs((self.args, self.kwargs))))

    @property
    def title(self) -> str:
        """For people: the operator and the part of the model that it is of."""
        operator = getattr(self.target, "__name__", str(self.target)).removesuffix(".default")
        return f"{operator} ({self.name})" + (f" of {self.part}" if self.part else "")

    def call(self, values: Callable[[int], Any]) -> Any:
        """The result, of arguments that ``values`` gives for each node."""
        assert self.target is not None
        args, kwargs = substitute_refs((self.args, self.kwargs), values)
        return self.target(*args, **kwargs)


@dataclass
class Graph:
    """``nodes`` in an order in which each comes after what it takes.

    ``tensors`` are those of the model, by node: parameters and buffers, not copies of them.
    ``pack`` makes the model's result of a tensor; ``written`` are attributes that the model sets
    itself while it runs, by the module they are of.
    """

    nodes: list[Node]
    inputs: list[int]
    output: int
    tensors: dict[int, Tensor]
    pack: Callable[[Tensor], Any]
    written: set[tuple[int, str]] = field(default_factory=set)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the model was on the CPU when its graph was taken."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors.values())

    @cached_property
    def card(self) -> torch.device | None:
        """The card that the model was on then."""
        devices = (tensor.device for tensor in self.tensors.values())
        return next((device for device in devices if device.type == "cuda"), None)

    def users(self) -> dict[int, list[Node]]:
        """By result the operators that take it."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for one in node.refs:
                found.setdefault(one, []).append(node)
        return found


def iter_refs(tree: Any) -> Iterator[NodeRef]:
    """Every `NodeRef` in nested tuples, lists and dictionaries."""
    if isinstance(tree, NodeRef):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iter_refs(item)
    elif isinstance(tree, dict):
        yield from iter_refs(list(tree.values()))


def bind_refs(args: tuple[Any, ...]) -> Callable[[Mapping[int, Any]], tuple[Any, ...]]:
    """`substitute_refs` for the same arguments again and again."""
    if any(True for arg in args if not isinstance(arg, NodeRef) for _ in iter_refs(arg)):
        return lambda values: substitute_refs(args, values.__getitem__)
    places = [(place, arg.node) for place, arg in enumerate(args) if isinstance(arg, NodeRef)]

    def bound(values: Mapping[int, Any]) -> tuple[Any, ...]:
        found = list(args)
        for place, node in places:
            found[place] = values[node]
        return tuple(found)

    return bound


def substitute_refs(tree: Any, values: Callable[[int], Any]) -> Any:
    """The same with a value for each `NodeRef`."""
    if isinstance(tree, NodeRef):
        return values(tree.node)
    if isinstance(tree, (tuple, list)):
        # Most are numbers, and this runs for every operator of every band.
        return type(tree)(
            [substitute_refs(item, values) if isinstance(item, _DEEP) else item for item in tree]
        )
    if isinstance(tree, dict):
        return {key: substitute_refs(item, values) for key, item in tree.items()}
    return tree


_DEEP = (NodeRef, tuple, list, dict)
