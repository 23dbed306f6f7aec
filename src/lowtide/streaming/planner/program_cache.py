"""Caches of one network by input size: its stream planners, and on disk its captured graphs.

Capturing a deep network takes seconds and 100 MiB.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap
from lowtide.memory.plan_store import JsonCache, machine_facts
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.graph import OperatorGraph
from lowtide.streaming.capture.graph_json import (
    NotSerializableError,
    graph_from_json,
    graph_to_json,
)
from lowtide.streaming.capture.model_inputs import memory_format_of
from lowtide.streaming.certificate import StreamCertificate
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.tiles.network import RunnableNetwork

# Sizes whose programs are kept: a folder of photographs has portrait and landscape ones, and wide
# images may run in panels.
_MAX_PROGRAMS = 4
# Seconds of capture, drafting, dry run and proof, per submodule.
_MODULE_SECONDS = 0.06


class StreamPlannerCache:
    """Planners of ``network``, one capture for each input size.

    Methods raise `ModelError`, always with the same reason, for a network that cannot be captured.

    Args:
        network: The network.
        on_capture: Called before the first capture, run or trace of a size, which takes seconds.
        identity: What the network's weights and settings follow from, to find graphs that earlier
            processes captured; None for a network that is known to this process alone.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        on_capture: Callable[[], None] = lambda: None,
        *,
        identity: str | None = None,
    ) -> None:
        self.network = network
        # No method of this object: a cycle of references would keep the weights for longer.
        self._find = functools.lru_cache(_MAX_PROGRAMS)(
            functools.partial(_planner_or_error, network, on_capture, identity)
        )

    @property
    def planning_seconds(self) -> float:
        """Estimated seconds to plan the first image of a size; 0 where there is no graph."""
        module = self.network.forward
        count = sum(1 for _ in module.modules()) if isinstance(module, nn.Module) else 0
        return _MODULE_SECONDS * count

    def planner(self, height: int, width: int) -> StreamPlanner:
        """Return the planner for one image of this size."""
        known = self._find(height, width)
        if isinstance(known, ModelError):
            raise ModelError(known.message)
        return known

    def program(self, height: int, width: int) -> StreamProgram:
        """Return the program for one image of this size."""
        return self.planner(height, width).program

    def certificate(self, height: int, width: int) -> StreamCertificate:
        """Return the proof that bands of this size reproduce the network."""
        return self.planner(height, width).certificate


def _planner_or_error(
    network: RunnableNetwork,
    on_capture: Callable[[], None],
    identity: str | None,
    height: int,
    width: int,
) -> StreamPlanner | ModelError:
    begin = functools.cache(on_capture)
    try:
        return _planner(network, begin, identity, height, width)
    except ModelError as error:
        return error.with_traceback(None)


def _planner(
    network: RunnableNetwork,
    begin: Callable[[], None],
    identity: str | None,
    height: int,
    width: int,
) -> StreamPlanner:
    module = network.forward
    if not isinstance(module, nn.Module):
        raise ModelError("a network that is not a torch.nn.Module has no graph to capture")
    example = _example(network, height, width)
    store = None if identity is None else GraphStore(identity, module)
    graph = None if store is None else store.get(example)
    if graph is None:
        begin()
        try:
            graph = capture_graph(module, example)
        finally:
            trim_heap(collect=True)  # half of the memory of a capture is garbage by now
        if store is not None:
            store.put(example, graph)
    program = lower_to_rows(graph)
    shape = program.graph.nodes[program.output].meta.shape
    expected = 1, network.out_channels, height * network.scale, width * network.scale
    if shape != expected:
        found, wanted = ("×".join(map(str, sizes)) for sizes in (shape, expected))
        raise ModelError(f"its output for one image is {found}, not {wanted}")
    return StreamPlanner(
        module, example, whole_image=False, program=program, before_computing=begin
    )


def _example(network: RunnableNetwork, height: int, width: int) -> Tensor:
    """Return an image that takes no memory: only shape, dtype and memory format count."""
    shape = 1, network.in_channels, height, width
    if network.device == "cpu":  # pages that nothing touches
        return torch.empty(shape, memory_format=network.memory_format)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, device=network.device, memory_format=network.memory_format)


@functools.cache
def import_capture_libraries() -> None:
    """Import the many libraries of a capture, by capturing a tiny module."""
    tiny = nn.Conv2d(1, 1, 1, device="cpu", dtype=torch.float32)
    capture_graph(tiny.eval(), torch.zeros(1, 1, 2, 2, device="cpu", dtype=torch.float32))


# Packages whose code is part of the key anyway.
_KNOWN_PACKAGES = frozenset({"torch", "lowtide"})


class GraphStore:
    """Graphs of one network in the cache folder, by the shape of its input.

    Args:
        network: Identity of the network: what its weights and settings follow from.
        module: The network as it is built from that.
    """

    def __init__(self, network: str, module: nn.Module) -> None:
        self._module, self._code = module, _code_digest(module)
        kind = type(module).__qualname__, repr(module), module.training
        self._network = network, kind

    def get(self, image: Tensor) -> OperatorGraph | None:
        """Return the graph for inputs like ``image`` (B, C, H, W), or None."""
        stored = JsonCache().get("graph", *self._facts(image))
        if stored is None:
            return None
        try:
            return graph_from_json(stored, self._module)
        except NotSerializableError:  # operators of a package that is not imported here
            return None

    def put(self, image: Tensor, graph: OperatorGraph) -> None:
        """Store a graph as captured; one that JSON cannot hold is captured each time."""
        if self._code is None:
            return
        with contextlib.suppress(NotSerializableError):
            stored = graph_to_json(graph, self._module)
            JsonCache().put("graph", *self._facts(image), value=stored)

    def _facts(self, image: Tensor) -> tuple[object, ...]:
        return (
            *self._network,
            self._code,
            (image.shape, image.dtype, memory_format_of(image)),
            torch.get_default_dtype(),
            AutocastState.current(image.device.type),
            *machine_facts(str(image.device)),
        )


def _code_digest(module: nn.Module) -> str | None:
    """Return a hash of the source of a network's classes; None for one that has no files."""
    homes = {type(part).__module__ for part in module.modules()}
    digest = hashlib.sha256()
    for name in sorted(homes):
        package = name.partition(".")[0]
        if package in _KNOWN_PACKAGES:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return None
        try:
            digest.update(f"{package} {version(package)} {name}".encode())
            digest.update(Path(file).read_bytes())
        except (PackageNotFoundError, OSError):  # a script, whose helpers may be anywhere
            return None
    return digest.hexdigest()
