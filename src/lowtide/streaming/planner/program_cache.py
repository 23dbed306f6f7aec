"""Cache of one network's stream planners, by input size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.certificate import Certificate
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.planner.stream_planner import StreamPlanner
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Sizes whose programs are kept: a folder of photographs has portrait and landscape ones, and wide
# images may run in panels.
_MAX_PROGRAMS = 4
# Seconds of capture, drafting, dry run and proof, per submodule.
_MODULE_SECONDS = 0.06


class ProgramCache:
    """Planners of ``network``, one capture for each input size.

    ``on_capture`` is called before each capture, which takes seconds. Methods raise `ModelError`,
    always with the same reason, for a network that cannot be captured.
    """

    def __init__(self, network: NetworkSpec, on_capture: Callable[[], None] | None = None) -> None:
        self.network = network
        # No method of this object: a cycle of references would keep the weights for longer.
        self._find = functools.lru_cache(_MAX_PROGRAMS)(
            functools.partial(_planner_or_error, network, on_capture)
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
    network: NetworkSpec, on_capture: Callable[[], None] | None, height: int, width: int
) -> StreamPlanner | ModelError:
    if on_capture is not None:
        on_capture()
    try:
        return _planner(network, height, width)
    except ModelError as error:
        return error.with_traceback(None)
    finally:
        trim_heap(collect=True)  # half of the memory of a capture is garbage by now


def _planner(network: NetworkSpec, height: int, width: int) -> StreamPlanner:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not isinstance(network.forward, nn.Module):
        raise ModelError("a network that is not a torch.nn.Module has no graph to capture")
    # An example without memory: only shape, dtype and memory format count.
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = torch.empty(
            1,
            network.in_channels,
            height,
            width,
            device=network.device,
            memory_format=network.memory_format,
        )
    planner = StreamPlanner(network.forward, example, whole_image=False)
    shape = planner.program.graph.nodes[planner.program.output].meta.shape
    expected = 1, network.out_channels, height * network.scale, width * network.scale
    if shape != expected:
        found, wanted = ("×".join(map(str, sizes)) for sizes in (shape, expected))
        raise ModelError(f"its output for one image is {found}, not {wanted}")
    return planner


@functools.cache
def preload_capture() -> None:
    """Import the many libraries of a capture, by capturing a tiny module."""
    tiny = nn.Conv2d(1, 1, 1, device="cpu", dtype=torch.float32)
    capture(tiny.eval(), torch.zeros(1, 1, 2, 2, device="cpu", dtype=torch.float32))
