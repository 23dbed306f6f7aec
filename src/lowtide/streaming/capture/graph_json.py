"""A captured graph as JSON, so that a later process need not capture it again.

Weights are not stored but named: the graph takes them from the module that it is read for.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.streaming.capture.graph import (
    GraphNode,
    NodeRef,
    OneResultOp,
    OperatorGraph,
    TensorMeta,
)
from lowtide.streaming.capture.outputs import unpack_output

# Bytes of all constants that are no weights; more would make the file as large as those.
_MAX_CONSTANT_BYTES = 1 << 20
_PLAIN = (bool, int, float, str, type(None))
# Values of PyTorch that arguments may be, by the name that follows "torch.".
_NAMED = (torch.dtype, torch.memory_format, torch.layout)


class NotSerializableError(Exception):
    """A graph has parts that JSON does not describe, or describes what is not here."""


def graph_to_json(graph: OperatorGraph, module: nn.Module) -> dict[str, Any]:
    """Return a graph of ``module``, as captured, in values that JSON can hold.

    Raises:
        NotPlainError: It has parts that these do not describe, such as a submodule that runs as one
            operator.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    written = [(paths.get(owner), name) for owner, name in graph.written_attributes]
    result = torch.empty(0)
    plain_output = len(graph.outputs) == 1 and graph.repack([result]) is result
    if not plain_output or any(path is None for path, _ in written):
        raise NotSerializableError
    return {
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "inputs": graph.inputs,
        "axes": graph.axes,
        "fixed": graph.fixed,
        "outputs": graph.outputs,
        "tensors": _tensors_to_json(graph.tensors, module),
        "written": written,
    }


def graph_from_json(stored: dict[str, Any], module: nn.Module) -> OperatorGraph:
    """Return the graph that `graph_to_json` described, with the weights of ``module``.

    Raises:
        NotPlainError: It names operators or weights that are not here.
    """
    own = _named_tensors(module)
    try:
        tensors = {
            int(place): own[found] if isinstance(found, str) else _constant_from_json(found)
            for place, found in stored["tensors"].items()
        }
        nodes = [_node_from_json(place, *one) for place, one in enumerate(stored["nodes"])]
        written = {(id(module.get_submodule(path)), name) for path, name in stored["written"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotSerializableError from error
    return OperatorGraph(
        nodes,
        stored["inputs"],
        stored["axes"],
        stored["fixed"],
        stored["outputs"],
        tensors,
        unpack_output(torch.empty(0))[1],
        written,
    )


def _node_to_json(node: GraphNode) -> list[Any]:
    return [
        node.name,
        node.kind,
        list(node.meta.shape),
        _name(node.meta.dtype),
        _target_to_json(node.target),
        _to_json(node.args),
        {key: _to_json(value) for key, value in node.kwargs.items()},
        node.module_path,
    ]


def _node_from_json(
    index: int,
    name: str,
    kind: str,
    shape: list[int],
    dtype: str,
    target: list[Any] | None,
    args: Any,
    kwargs: dict[str, Any],
    module_path: str,
) -> GraphNode:
    meta = TensorMeta(tuple(shape), getattr(torch, dtype))
    named = {key: _from_json(value) for key, value in kwargs.items()}
    return GraphNode(
        index, name, kind, meta, _target_from_json(target), _from_json(args), named, module_path
    )


def _target_to_json(target: Any) -> list[Any] | None:
    if target is None:
        return None
    which = None
    if isinstance(target, OneResultOp):
        target, which = target.target, target.which
    if not isinstance(target, torch._ops.OpOverload):
        raise NotSerializableError
    return [*str(target).split("."), which]


def _target_from_json(target: list[Any] | None) -> Callable[..., Any] | None:
    if target is None:
        return None
    *names, which = target
    found: Any = torch.ops
    for name in names:
        found = getattr(found, name)
    return found if which is None else OneResultOp(found, which)


def _to_json(value: Any) -> Any:
    if isinstance(value, NodeRef):
        return {"node": value.node}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(one) for one in value]}
    if isinstance(value, list):
        return [_to_json(one) for one in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, _NAMED):
        return {"torch": _name(value)}
    if isinstance(value, _PLAIN):
        return value
    raise NotSerializableError


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return NodeRef(content)
    if kind == "tuple":
        return tuple(_from_json(one) for one in content)
    return torch.device(content) if kind == "device" else getattr(torch, content)


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _tensors_to_json(tensors: dict[int, Tensor], module: nn.Module) -> dict[str, Any]:
    names = {id(tensor): name for name, tensor in _named_tensors(module).items()}
    constants = [tensor for tensor in tensors.values() if id(tensor) not in names]
    if sum(tensor.nbytes for tensor in constants) > _MAX_CONSTANT_BYTES:
        raise NotSerializableError
    return {
        str(place): names.get(id(tensor)) or _constant_to_json(tensor)
        for place, tensor in tensors.items()
    }


def _constant_to_json(tensor: Tensor) -> list[Any]:
    if not tensor.is_contiguous() or not tensor.nbytes:
        raise NotSerializableError
    data = tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    facts = list(tensor.shape), _name(tensor.dtype), str(tensor.device)
    return [*facts, base64.b64encode(data).decode()]


def _constant_from_json(stored: list[Any]) -> Tensor:
    shape, dtype, device, data = stored
    values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))
    return values.view(shape).to(device)
