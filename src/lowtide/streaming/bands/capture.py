"""From a module to its graph of operators, for inputs of one size."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lowtide.core.errors import ModelError
from lowtide.core.one_trace import one_trace
from lowtide.streaming.bands.blocks import AnyBlock, Blocks
from lowtide.streaming.bands.graph import Graph, Like, Node, Ref
from lowtide.streaming.bands.rules.rule import short

_IGNORED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"}

_FILLED = {
    "aten.new_zeros.default": torch.ops.aten.zeros.default,
    "aten.new_ones.default": torch.ops.aten.ones.default,
    "aten.new_full.default": torch.ops.aten.full.default,
}


def capture(module: nn.Module, image: Tensor) -> Graph:
    """The operators that ``module`` applies to ``image``; only its shape and type count.

    Shapes are those of this image: another size is another graph. A module inside it that computes
    with values in Python becomes one operator, a `Block`, if a row of its result depends on rows
    nearby alone. Raises `ModelError` where it does not, and for modules that draw random numbers
    or train.
    """
    if module.training:
        raise ModelError(
            "a model in training mode cannot be streamed: its norms depend on all rows at once",
            hint="model.eval()",
        )
    blocks = Blocks(module, len(image))
    while True:
        try:
            with blocks.standing_in():
                exported = _exported(module, image)
        except Exception as error:
            problem = f"the graph of {type(module).__name__} cannot be had: {_first_line(error)}"
            try:
                found = blocks.add()
            except ModelError as refusal:
                raise ModelError(f"{problem}; and {refusal.message}") from error
            if not found:
                raise ModelError(problem) from error
        else:
            return _graph(module, exported, blocks.found)


def _exported(module: nn.Module, image: Tensor) -> Any:
    kept = {name: tensor.data for name, tensor in _tensors(module)}
    try:
        with torch.no_grad(), one_trace():
            exported = torch.export.export(module, (image,), strict=False)
            return exported.run_decompositions({})
    finally:
        # Models that set their own weights while they run were given fake ones by the trace.
        for name, tensor in _tensors(module):
            if tensor.data is not kept[name]:
                tensor.data = kept[name]


def _first_line(error: Exception) -> str:
    message = str(error).strip().splitlines()
    return message[0] if message else type(error).__name__


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """By every name they have: layers may share them."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _graph(module: nn.Module, exported: Any, blocks: Sequence[AnyBlock]) -> Graph:
    signature = exported.graph_signature
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    own = dict(_tensors(module))
    nodes: list[Node] = []
    places: dict[fx.Node, int] = {}
    inputs: list[int] = []
    tensors: dict[int, Tensor] = {}
    known: dict[str, int] = {}
    output = -1
    for node in exported.graph.nodes:
        if node.op == "output":
            output = _only_output(signature.user_outputs, places)
            continue
        if str(node.target) in _IGNORED:
            continue
        if _copies_alike(node):
            places[node] = places[node.args[0]]
            continue
        if node.target is operator.getitem:
            place = _item(node, nodes, places)
        elif not isinstance(node.meta.get("val"), Tensor):
            continue  # several results: each that is used is an item of its own
        elif node.op == "placeholder":
            place = _add(nodes, node, "input" if node.name in signature.user_inputs else "tensor")
            if node.name in signature.user_inputs:
                inputs.append(place)
            elif node.name in sources:
                tensors[place] = own[sources[node.name]]
            else:
                name = signature.inputs_to_lifted_tensor_constants[node.name]
                tensors[place] = exported.constants[name]
        else:
            place = _call(nodes, node, places, blocks)
        places[node] = _same(nodes, _unchanged(nodes, place), known)
    return Graph(nodes, inputs, output, tensors)


def _add(nodes: list[Node], node: fx.Node, kind: str, **more: Any) -> int:
    value = node.meta["val"]
    like = Like(tuple(int(side) for side in value.shape), value.dtype)
    nodes.append(Node(len(nodes), node.name, kind, like, **more))
    return len(nodes) - 1


def _copies_alike(node: fx.Node) -> bool:
    """Whether a result is a copy of another one that lies as that does, and so can be that: nothing
    in a graph is changed in place. PyTorch 2.11 takes dropout at rest for one."""
    (given, *rest) = node.args or (None,)
    if str(node.target) != "aten.clone.default" or rest or node.kwargs:
        return False
    if not isinstance(given, fx.Node) or given.op != "call_function":
        return False
    return given.meta["val"].stride() == node.meta["val"].stride()


def _unchanged(nodes: list[Node], place: int) -> int:
    """What a node takes, if it gives back just that: models divide by scales, of which most are
    one, and fetch and write whole maps for it."""
    node = nodes[place]
    if short(node.target) not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return place
    given, scale = node.args
    if isinstance(scale, Ref) or not isinstance(given, Ref) or scale != 1:
        return place
    before = nodes[given.node]
    if before.kind != "call" or before.like != node.like:
        return place
    nodes.pop()
    return before.index


def _same(nodes: list[Node], place: int, known: dict[str, int]) -> int:
    """An earlier node that does the same to the same, if there is one: models make their masks
    anew in every block."""
    node = nodes[place]
    if node.kind != "call":
        return place
    first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", place)
    if first != place:
        nodes.pop()
    return first


def _call(
    nodes: list[Node], node: fx.Node, places: dict[fx.Node, int], blocks: Sequence[AnyBlock]
) -> int:
    target = node.target
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and not _at_rest(node):
        raise ModelError(f"{target} draws random numbers: a streamed run would draw others")
    # fx's immutable lists and dictionaries take no other items.
    args, kwargs = _plain(node.args, places), _plain(node.kwargs, places)
    if str(target) == "aten.type_as.default":
        # Of the other tensor just the type counts.
        target, args, kwargs = torch.ops.aten.to.dtype, (args[0], node.meta["val"].dtype), {}
    if made := _FILLED.get(str(target)):
        # Of it not even that.
        target, args = made, tuple(args[1:])
        kwargs = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    if target is torch.ops.lowtide.block.default:
        target, args = blocks[args[1]], args[:1]
    return _add(nodes, node, "call", target=target, args=args, kwargs=kwargs)


def _at_rest(node: fx.Node) -> bool:
    """Whether an operator that could drop numbers out drops none."""
    name = str(node.target)
    if "dropout" in name:
        return not (node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True))
    if "scaled_dot_product_attention" in name:
        return not (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return False


def _plain(tree: Any, places: dict[fx.Node, int]) -> Any:
    """Arguments with a `Ref` for each result."""
    if isinstance(tree, fx.Node):
        return Ref(places[tree])
    if isinstance(tree, dict):
        return {key: _plain(item, places) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        plain = [_plain(item, places) for item in tree]
        return tuple(plain) if isinstance(tree, tuple) else plain
    return tree


def _item(node: fx.Node, nodes: list[Node], places: dict[fx.Node, int]) -> int:
    """One result of an operator that has several, as an operator of its own.

    Pieces of a split become slices; others are computed for each result that is used.
    """
    several, which = node.args
    assert isinstance(several, fx.Node) and isinstance(which, int)
    args, kwargs = _plain(several.args, places), _plain(several.kwargs, places)
    shapes = [tuple(value.shape) for value in several.meta["val"]]
    name = str(several.target)
    aten = torch.ops.aten
    if name.startswith(("aten.split", "aten.chunk", "aten.tensor_split")):
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        start = sum(shape[dim] for shape in shapes[:which])
        call = aten.slice.Tensor, (args[0], dim, start, start + shapes[which][dim])
    elif name.startswith("aten.unbind"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        call = aten.select.int, (args[0], dim, which)
    else:
        target = several.target

        def one(*args: Any, **kwargs: Any) -> Tensor:
            return target(*args, **kwargs)[which]  # type: ignore[operator]

        one.__name__ = f"{name.split('.')[1]}[{which}]"
        return _add(nodes, node, "call", target=one, args=args, kwargs=kwargs)
    return _add(nodes, node, "call", target=call[0], args=call[1])


def _only_output(names: Any, places: dict[fx.Node, int]) -> int:
    """The result; what the model writes to its own buffers is no result."""
    found = [place for node, place in places.items() if node.name in names]
    if len(names) != 1 or len(found) != 1:
        raise ModelError(f"a model with {len(names)} results cannot be streamed; one is needed")
    return found[0]
