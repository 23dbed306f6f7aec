"""Cache of one network's stream planners, by input size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.certificate import Certificate
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.planner.graph_store import GraphStore
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Sizes whose programs are kept: a folder of photographs has portrait and landscape ones, and wide
# images may run in panels.
_MAX_PROGRAMS = 4
# Seconds of capture, drafting, dry run and proof, per submodule.
_MODULE_SECONDS = 0.06


class ProgramCache:
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
        network: NetworkSpec,
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

    def certificate(self, height: int, width: int) -> Certificate:
        """Return the proof that bands of this size reproduce the network."""
        return self.planner(height, width).certificate


def _planner_or_error(
    network: NetworkSpec,
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
    network: NetworkSpec,
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
            graph = capture(module, example)
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


def _example(network: NetworkSpec, height: int, width: int) -> Tensor:
    """Return an image that takes no memory: only shape, dtype and memory format count."""
    shape = 1, network.in_channels, height, width
    if network.device == "cpu":  # pages that nothing touches
        return torch.empty(shape, memory_format=network.memory_format)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, device=network.device, memory_format=network.memory_format)


@functools.cache
def preload_capture() -> None:
    """Import the many libraries of a capture, by capturing a tiny module."""
    tiny = nn.Conv2d(1, 1, 1, device="cpu", dtype=torch.float32)
    capture(tiny.eval(), torch.zeros(1, 1, 2, 2, device="cpu", dtype=torch.float32))
