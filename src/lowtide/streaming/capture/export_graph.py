"""Graph capture with `torch.export`: from a module to its operators for one shape."""

from __future__ import annotations

import linecache
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph_module import _loader

from lowtide.core.errors import ModelError
from lowtide.core.logging import silence_warnings
from lowtide.core.trace_cache import TRACE_LOCK, trace_cache
from lowtide.memory.library_memory import require_room_to_plan
from lowtide.memory.oom import is_out_of_memory
from lowtide.memory.tracing.python_place import AttributeKey, PlaceChange
from lowtide.memory.tracing.python_places import hooks_for_parts_only
from lowtide.memory.tracing.traced_code import TracedCode, traced_code
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.capture_errors import (
    READS_VALUES,
    RefuseNumbersMode,
    capture_error_reason,
    module_path_of,
    silence_graph_printing,
)
from lowtide.streaming.capture.functional_graph import compute_outputs_early, functional_graph
from lowtide.streaming.capture.graph import (
    GraphNode,
    NodeRef,
    OneResultOp,
    OperatorGraph,
    TensorMeta,
    op_name,
)
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.capture.opaque_search import AnyOpaqueModule, OpaqueModuleSearch
from lowtide.streaming.capture.outputs import Repack, unpack_output
from lowtide.streaming.capture.remembered import watch_writes

_IGNORED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"}

_FACTORY_OPS = {
    "aten.new_zeros.default": torch.ops.aten.zeros.default,
    "aten.new_ones.default": torch.ops.aten.ones.default,
    "aten.new_full.default": torch.ops.aten.full.default,
}


def capture_graph(module: nn.Module, inputs: Tensor | ModelInputs) -> OperatorGraph:
    """Capture the operators that ``module`` applies to inputs of these shapes.

    Of tensors only shape, dtype and device count; another shape is another graph. A submodule
    whose Python code depends on tensor values becomes one operator, an `OpaqueModuleOp`, if its
    rows depend on rows nearby only.

    Args:
        module: Model in eval mode that returns tensors, maybe in a container.
        inputs: Example of its arguments, or an image (B, C, H, W) alone.

    Raises:
        ModelError: The module is in training mode, draws random numbers, or cannot be captured.
        BudgetError: A limit on this process leaves too little for what capturing imports.
    """
    require_room_to_plan("capturing a network")
    if module.training:
        raise ModelError(
            "a model in training mode cannot be streamed: its norms depend on all rows at once",
            hint="model.eval()",
        )
    with TRACE_LOCK, traced_code(module) as code:
        return _capture(module, ModelInputs.of(inputs), code)


def _capture(module: nn.Module, inputs: ModelInputs, code: TracedCode) -> OperatorGraph:
    flat = _FlatModule(module, inputs, code)
    autocast = AutocastState.current(inputs.first.device.type)
    graph = _capture_with_opaque(flat, OpaqueModuleSearch(module, inputs, autocast))
    for change in flat.call.changes:
        if change.draws:
            raise ModelError(
                f"this model draws random numbers from {change.name}, and a streamed run would"
                " draw different ones"
            )
    changed = {one.attribute for one in flat.call.changes if one.owned and one.attribute}
    graph.written_attributes |= changed | flat.call.written
    return graph


def _capture_with_opaque(module: _FlatModule, opaque: OpaqueModuleSearch) -> OperatorGraph:
    while True:
        try:
            with opaque.with_placeholders(), hooks_for_parts_only(module.module):
                exported = _export(module, module.inputs.tensors)
            return _build_graph(module, exported, opaque.modules)
        except ModelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason, hint = capture_error_reason(error)
            part = opaque.failed_module(type(module.module).__name__)
            problem = f"{part} cannot be captured: {reason}"
            try:
                found = opaque.add_failed()
            except ModelError as refusal:
                if not isinstance(error, TypeError):
                    problem = f"{problem}; and {refusal.message}"
                raise ModelError(problem, hint=hint) from error
            if not found:
                raise ModelError(problem, hint=hint) from error


class _TracedCall:
    """What a call left besides tensors.

    ``pack`` puts tensors back into the module's output container; the module set ``written``, and
    made ``changes``.
    """

    pack: Repack
    written: set[AttributeKey]
    changes: list[PlaceChange]


class _FlatModule(nn.Module):
    """Wrapper that takes only tensors and returns only those of a module's result."""

    def __init__(self, module: nn.Module, inputs: ModelInputs, code: TracedCode) -> None:
        super().__init__()
        self.module, self.inputs, self._code = module, inputs, code
        # an object of its own: older versions of PyTorch refuse attributes that forward creates
        self.call = _TracedCall()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the module's result tensors for these tensors of its arguments."""
        if (mode := detect_fake_mode(tensors)) is not None:
            self._code.watch(mode)
        kept, writes = self._code.places.kept(), watch_writes(self.module)
        with kept as changes, writes as written, RefuseNumbersMode():
            # in a copy of the context variables, which are put back so
            called = copy_context().run(self.inputs.call, self.module, tensors)
            found, pack = unpack_output(called)
        self.call.pack, self.call.written, self.call.changes = pack, written, changes
        # an output that is an input itself would be no operator of the graph
        return tuple(one.clone() if any(one is it for it in tensors) else one for one in found)


def _export(module: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
    kept = {name: tensor.data for name, tensor in _tensors(module)}
    try:
        with (
            torch.no_grad(),
            trace_cache(),
            silence_graph_printing(),
            silence_warnings("torch"),
            _forget_generated_code(),
            _no_stack_traces(),
            _use_lazy_graph_module(True),  # code that nothing calls is a sixth of a capture
        ):
            exported = functional_graph(torch.export.export(module, tensors, strict=False))
            compute_outputs_early(exported.graph)
            return exported
    finally:
        # The trace leaves fake weights in models that set their own weights while they run.
        for name, tensor in _tensors(module):
            if tensor.data is not kept[name]:
                tensor.data = kept[name]


@contextmanager
def _forget_generated_code() -> Iterator[None]:
    """Drop what PyTorch keeps for good of each trace inside: 0.2 MiB for a small network.

    That is the source of each graph's generated code, for tracebacks of graphs that are gone, and
    the results of operators on fake tensors, which the next size does not share.
    """
    sources = _loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in set(sources) - before:
            del sources[name]
            linecache.cache.pop(name, None)
        FakeTensorMode.cache_clear()


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Keep PyTorch from finding the source line of each operator: a tenth of a capture."""
    before = getattr(fx_config, "do_not_emit_stack_traces", None)
    if before is None:  # an older version
        yield
        return
    try:
        fx_config.do_not_emit_stack_traces = True
        yield
    finally:
        fx_config.do_not_emit_stack_traces = before


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers under every name, since layers may share them."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _build_graph(
    module: _FlatModule, exported: Any, opaque: Sequence[AnyOpaqueModule]
) -> OperatorGraph:
    signature = exported.graph_signature
    _reject_buffer_updates(module, exported)
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    own = dict(_tensors(module))
    nodes: list[GraphNode] = []
    places: dict[fx.Node, int] = {}
    inputs: list[int] = []
    tensors: dict[int, Tensor] = {}
    known: dict[str, int] = {}
    outputs: list[int] = []
    for node in exported.graph.nodes:
        if node.op == "output":
            outputs = _output_places(signature.user_outputs, places)
            continue
        if str(node.target) in _IGNORED:
            continue
        if _is_redundant_clone(node):
            places[node] = places[node.args[0]]
            continue
        if node.target is operator.getitem:
            place = _add_getitem(node, nodes, places)
        elif not isinstance(node.meta.get("val"), Tensor):
            continue  # several results: each that is used becomes its own node
        elif node.op == "placeholder":
            given = node.name in signature.user_inputs
            fixed = given and len(inputs) not in module.inputs.axes
            place = _add(nodes, node, "fixed" if fixed else "input" if given else "tensor")
            if given:
                inputs.append(place)
            elif node.name in sources:
                tensors[place] = own[sources[node.name]]
            else:
                name = signature.inputs_to_lifted_tensor_constants[node.name]
                tensors[place] = exported.constants[name]
                if isinstance(tensors[place], FakeTensor):
                    raise ModelError(
                        "this model reads a tensor without values, which an earlier trace of its"
                        " code left",
                        hint="make the model anew",
                    )
        else:
            place = _add_call(nodes, node, places, opaque)
        places[node] = _deduplicate(nodes, _skip_identity_scale(nodes, place), known)
    axes = module.inputs.axes
    fixed = [place for position, place in enumerate(inputs) if position not in axes]
    streamed = [inputs[position] for position in axes]
    return OperatorGraph(
        nodes, streamed, list(axes.values()), fixed, outputs, tensors, module.call.pack
    )


def _reject_buffer_updates(module: _FlatModule, exported: Any) -> None:
    """Raise `ModelError` for a model that writes into its buffers."""
    signature = exported.graph_signature
    for node in exported.graph.nodes:
        buffer = signature.buffers_to_mutate.get(node.name)
        if op_name(node.target) == "instance_norm" and node.args[3] is not None and node.args[5]:
            buffer = signature.inputs_to_buffers[node.args[3].name]
        if buffer is not None:
            training = any(one.training for one in module.module.modules())
            raise ModelError(
                f"{'in training mode ' * training}this model updates its"
                f" {buffer.removeprefix('module.')} with each image, which a streamed run would not"
                " do",
                hint="model.eval()" if training else "call the model itself",
            )


def _add(nodes: list[GraphNode], node: fx.Node, kind: str, **more: Any) -> int:
    value = node.meta["val"]
    if any(not isinstance(side, int) for side in value.shape):
        raise ModelError(
            f"{module_path_of(node) or 'this model'} cannot be captured: the shape of"
            f" {op_name(node.target)} depends on the values of the image",
            hint="run it whole",
        )
    like = TensorMeta(tuple(value.shape), value.dtype)
    nodes.append(
        GraphNode(len(nodes), node.name, kind, like, module_path=module_path_of(node), **more)
    )
    return len(nodes) - 1


def _is_redundant_clone(node: fx.Node) -> bool:
    """Whether a node clones a tensor with its strides, and so can be dropped.

    Nothing in the graph is changed in place. PyTorch 2.11 exports dropout in eval mode as such a
    clone.
    """
    (given, *rest) = node.args or (None,)
    if str(node.target) != "aten.clone.default" or rest or node.kwargs:
        return False
    if not isinstance(given, fx.Node) or given.op != "call_function":
        return False
    return given.meta["val"].stride() == node.meta["val"].stride()


def _skip_identity_scale(nodes: list[GraphNode], place: int) -> int:
    """Return the input of a multiplication or division by 1 in place of its result.

    Models divide by scales that are mostly 1; dropping these saves a pass over whole maps.
    """
    node = nodes[place]
    if op_name(node.target) not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return place
    given, scale = node.args
    if isinstance(scale, NodeRef) or not isinstance(given, NodeRef) or scale != 1:
        return place
    before = nodes[given.node]
    if before.kind != "call" or before.meta != node.meta:
        return place
    nodes.pop()
    return before.index


def _deduplicate(nodes: list[GraphNode], place: int, known: dict[str, int]) -> int:
    """Return an earlier node with the same operator and arguments, if there is one.

    Common subexpressions are frequent: models build their masks again in every block.
    """
    node = nodes[place]
    if node.kind != "call":
        return place
    first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", place)
    if first != place:
        nodes.pop()
    return first


def _add_call(
    nodes: list[GraphNode],
    node: fx.Node,
    places: dict[fx.Node, int],
    opaque: Sequence[AnyOpaqueModule],
) -> int:
    target = node.target
    _reject_random(node)
    # plain containers, since fx's lists and dictionaries are immutable
    args, kwargs = _to_node_refs(node.args, places), _to_node_refs(node.kwargs, places)
    if str(target) == "aten.type_as.default":
        # Only the dtype of the other tensor counts.
        target, args, kwargs = torch.ops.aten.to.dtype, (args[0], node.meta["val"].dtype), {}
    if made := _FACTORY_OPS.get(str(target)):
        # Here not even the dtype of the first argument counts.
        target, args = made, tuple(args[1:])
        kwargs = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    if target is torch.ops.lowtide.block.default:
        target, args = opaque[args[1]], args[:1]
    return _add(nodes, node, "call", target=target, args=args, kwargs=kwargs)


def _reject_random(node: fx.Node) -> None:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(node):
        part = f" of {module_path_of(node)}" if module_path_of(node) else ""
        raise ModelError(
            f"{op_name(node.target)}{part} draws random numbers, and a streamed run would draw"
            " different ones",
            hint="draw them before, and pass them as an argument; or run it whole",
        )


def _draws_nothing(node: fx.Node) -> bool:
    """Whether an operator that may draw, such as dropout or an LSTM, draws nothing here."""
    target: Any = node.target
    arguments = target._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given |= dict(zip((one.name for one in arguments), node.args, strict=False)) | node.kwargs
    trains = given.get("train", given.get("training"))
    return trains is False or any(given.get(one) == 0 for one in ("p", "dropout", "dropout_p"))


def _to_node_refs(tree: Any, places: dict[fx.Node, int]) -> Any:
    """Return arguments with a `NodeRef` for each node, in plain containers."""
    if isinstance(tree, fx.Node):
        if tree not in places:  # a number, not a tensor
            part = module_path_of(tree) or "this model"
            raise ModelError(f"{part} cannot be captured: {READS_VALUES}", hint="run it whole")
        return NodeRef(places[tree])
    if isinstance(tree, dict):
        return {key: _to_node_refs(item, places) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        plain = [_to_node_refs(item, places) for item in tree]
        return tuple(plain) if isinstance(tree, tuple) else plain
    return tree


def _add_getitem(node: fx.Node, nodes: list[GraphNode], places: dict[fx.Node, int]) -> int:
    """Return the node of one result of an operator that has several.

    Pieces of a split become slices; other operators run once for each result that is used.
    """
    several, which = node.args
    assert isinstance(several, fx.Node) and isinstance(which, int)
    _reject_random(several)
    args, kwargs = _to_node_refs(several.args, places), _to_node_refs(several.kwargs, places)
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
        assert callable(several.target)
        one = OneResultOp(several.target, which)
        return _add(nodes, node, "call", target=one, args=args, kwargs=kwargs)
    return _add(nodes, node, "call", target=call[0], args=call[1])


def _output_places(names: Sequence[str], places: dict[fx.Node, int]) -> list[int]:
    """Return the nodes of the results; buffers that the model writes are none."""
    by_name = {node.name: place for node, place in places.items()}
    return [by_name[name] for name in names]
