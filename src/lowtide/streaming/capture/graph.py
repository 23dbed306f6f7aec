"""Captured graph of a model: operators as nodes with references to their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NodeRef:
    """Reference to the result of a node, as an argument of another."""

    node: int


@dataclass(frozen=True)
class OneResultOp:
    """Operator of one result, of an operator ``target`` that has several."""

    target: Callable[..., Any]
    which: int

    @property
    def __name__(self) -> str:
        return f"{str(self.target).split('.')[1]}[{self.which}]"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the operator and return that result."""
        return self.target(*args, **kwargs)[self.which]


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass
class GraphNode:
    """Node of a graph: an operator, an input or a tensor of the model.

    Attributes:
        index: Its position in `OperatorGraph.nodes`.
        name: Name from `torch.export`.
        kind: "input" (streamed), "fixed" (an input too), "tensor" or "call".
        meta: Shape and dtype of its result.
        target: Operator of a call.
        args: Arguments, with a `NodeRef` for each result.
        kwargs: Keyword arguments, likewise.
        module_path: Path of the module that the operator belongs to.
    """

    index: int
    name: str
    kind: str
    meta: TensorMeta
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    module_path: str = ""

    @property
    def refs(self) -> list[int]:
        """Nodes whose results this one takes, each once."""
        return list(dict.fromkeys(ref.node for ref in iter_refs((self.args, self.kwargs))))

    @property
    def title(self) -> str:
        """Name for error messages: the operator and the module that it belongs to."""
        operator = getattr(self.target, "__name__", str(self.target)).removesuffix(".default")
        return f"{operator} ({self.name})" + (f" of {self.module_path}" if self.module_path else "")

    def call(self, values: Callable[[int], Any]) -> Any:
        """Run the operator, with ``values`` returning the result of each referenced node."""
        assert self.target is not None
        args, kwargs = substitute_refs((self.args, self.kwargs), values)
        return self.target(*args, **kwargs)


@dataclass
class OperatorGraph:
    """Nodes of a model in topological order, with its tensors.

    Attributes:
        nodes: Nodes, each after its inputs.
        inputs: Nodes of the streamed inputs.
        axes: Streamed dim of each of these.
        fixed: Nodes of the inputs that every band takes whole.
        outputs: Nodes of the result tensors; a node that the model returns twice is there twice.
        tensors: Parameters and buffers of the model by node, not copies.
        repack: Puts result tensors into the model's output container.
        written_attributes: Attributes that the model sets while it runs, as (id of the module,
            name).
    """

    nodes: list[GraphNode]
    inputs: list[int]
    axes: list[int]
    fixed: list[int]
    outputs: list[int]
    tensors: dict[int, Tensor]
    repack: Callable[[Sequence[Tensor]], Any]
    written_attributes: set[tuple[int, str]] = field(default_factory=set)

    @property
    def digest(self) -> str:
        """Hash of the operators, their arguments and all shapes, without weights."""
        facts = (
            f"{op_name(node.target)} {node.args} {node.kwargs} {node.meta}" for node in self.nodes
        )
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the model was on the CPU when it was captured."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors.values())

    @cached_property
    def gpu(self) -> torch.device | None:
        """GPU that the model was on when it was captured, or None."""
        devices = (tensor.device for tensor in self.tensors.values())
        return next((device for device in devices if device.type == "cuda"), None)

    def meta(self, index: int) -> TensorMeta:
        """Return shape and dtype of a node's result."""
        return self.nodes[index].meta

    def users(self) -> dict[int, list[GraphNode]]:
        """Return by result the nodes that take it."""
        found: dict[int, list[GraphNode]] = {}
        for node in self.nodes:
            for one in node.refs:
                found.setdefault(one, []).append(node)
        return found


def iter_refs(tree: Any) -> Iterator[NodeRef]:
    """Yield every `NodeRef` in nested tuples, lists and dictionaries."""
    if isinstance(tree, NodeRef):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iter_refs(item)
    elif isinstance(tree, dict):
        yield from iter_refs(list(tree.values()))


def bind_refs(args: tuple[Any, ...]) -> Callable[[Mapping[int, Any]], tuple[Any, ...]]:
    """Return a fast `substitute_refs` for arguments that are used again and again.

    The function takes values by node index and returns the arguments.
    """
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
    """Return nested arguments with a value in place of each `NodeRef`."""
    if isinstance(tree, NodeRef):
        return values(tree.node)
    if isinstance(tree, (tuple, list)):
        # Most items are numbers, and this runs for every operator of every band.
        return type(tree)(
            [substitute_refs(item, values) if isinstance(item, _DEEP) else item for item in tree]
        )
    if isinstance(tree, dict):
        return {key: substitute_refs(item, values) for key, item in tree.items()}
    return tree


_DEEP = (NodeRef, tuple, list, dict)


def op_name(target: Any) -> str:
    """Return the name of an operator, such as ``conv2d`` for ``aten.conv2d.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return getattr(target, "__name__", str(target))
