"""Cache of one network's captured programs, by input size."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.core.heap import trim_heap
from lowtide.memory.cache import cache_folder
from lowtide.memory.profiles import local_profile
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.certificate import Certificate, certify
from lowtide.streaming.engine.placement import allowed_placements
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run
from lowtide.streaming.planner.layout_search import RESIDENT_SHARES, LayoutSearch, StreamLayout
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Sizes whose programs are kept: a folder of photographs has portrait and landscape ones, and wide
# images may run in panels.
_MAX_PROGRAMS = 4
# Number of drafts that become candidates.
_MAX_CANDIDATES = 8
# Seconds of capture, drafting, dry run and proof, per submodule.
_MODULE_SECONDS = 0.06


@dataclass
class _CachedProgram:
    program: StreamProgram | None = None
    refusal: str = ""
    search: LayoutSearch | None = None
    layouts: dict[bool, list[StreamLayout]] = field(default_factory=dict)
    certificate: Certificate | None = None


class ProgramCache:
    """Captured programs of ``network``, one capture for each input size.

    ``on_capture`` is called before each capture, which takes seconds. Methods raise `ModelError`,
    always with the same reason, for a network that cannot be captured.
    """

    def __init__(self, network: NetworkSpec, on_capture: Callable[[], None] | None = None) -> None:
        self.network, self.on_capture = network, on_capture
        self._cached: OrderedDict[tuple[int, int], _CachedProgram] = OrderedDict()

    @property
    def planning_seconds(self) -> float:
        """Estimated seconds to plan the first image of a size; 0 where there is no graph."""
        module = self.network.forward
        count = sum(1 for _ in module.modules()) if isinstance(module, nn.Module) else 0
        return _MODULE_SECONDS * count

    def program(self, height: int, width: int) -> StreamProgram:
        """Return the program for one image of this size."""
        known = self._entry(height, width)
        if known.program is None:
            raise ModelError(known.refusal)
        return known.program

    def layouts(self, height: int, width: int, *, low_memory: bool = False) -> list[StreamLayout]:
        """Return a few drafts on the Pareto front of memory and time.

        ``low_memory`` adds those for scarce memory.
        """
        program, known = self.program(height, width), self._entry(height, width)
        if low_memory not in known.layouts:
            known.search = known.search or LayoutSearch(program)
            cost_model = known.search.cost_model
            caps = (
                (*cost_model.low_memory_caps, *cost_model.caps) if low_memory else cost_model.caps
            )
            pages = allowed_placements(torch.device(self.network.device), "auto")
            known.layouts[low_memory] = _pareto_front(
                list(known.search.drafts(caps, pages, RESIDENT_SHARES))
            )
        return known.layouts[low_memory]

    def layout_for(self, height: int, width: int, key: tuple[object, ...]) -> StreamLayout:
        """Return the layout among `layouts` with this key."""
        known = self._entry(height, width).layouts
        return next(one for found in known.values() for one in found if one.key == key)

    def predict(self, height: int, width: int, layout: StreamLayout) -> DryRunResult:
        """Return the dry run of a layout: the exact bytes of a run."""
        device = torch.device(self.network.device)
        profile = None if device.type == "cpu" else local_profile(str(device))
        return dry_run(self.program(height, width), layout, whole_image=False, profile=profile)

    def certificate(self, height: int, width: int) -> Certificate:
        """Return the proof that bands reproduce the network, measured or from the cache.

        It is measured on a small image. Raises `ModelError` where the results differ.
        """
        program, known = self.program(height, width), self._entry(height, width)
        if known.certificate is None:
            example = self._example_input(height, width)
            known.certificate = certify(self._module(), example, program, cache_folder())
        return known.certificate

    def _entry(self, height: int, width: int) -> _CachedProgram:
        if (height, width) not in self._cached:
            self._cached[height, width] = self._capture(height, width)
            while len(self._cached) > _MAX_PROGRAMS:
                self._cached.popitem(last=False)
        self._cached.move_to_end((height, width))
        return self._cached[height, width]

    def _capture(self, height: int, width: int) -> _CachedProgram:
        if self.on_capture is not None:
            self.on_capture()
        try:
            program = lower_to_rows(capture(self._module(), self._example_input(height, width)))
        except ModelError as error:
            return _CachedProgram(refusal=error.message)
        finally:
            trim_heap(collect=True)  # half of the memory of a capture is garbage by now
        rows, like = program.rows[program.output], program.graph.nodes[program.output].meta
        sides = (side * self.network.scale for side in (height, width))
        expected = (1, self.network.out_channels, *sides)
        if rows.dim != 2 or like.shape != expected:
            shape, wanted = ("×".join(map(str, sizes)) for sizes in (like.shape, expected))
            return _CachedProgram(refusal=f"its output for one image is {shape}, not {wanted}")
        return _CachedProgram(program)

    def _module(self) -> nn.Module:
        if not isinstance(self.network.forward, nn.Module):
            raise ModelError("a network that is not a torch.nn.Module has no graph to capture")
        return self.network.forward

    def _example_input(self, height: int, width: int) -> Tensor:
        """Return an input without memory: only shape, dtype and memory format count."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        network = self.network
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.empty(
                1,
                network.in_channels,
                height,
                width,
                device=network.device,
                memory_format=network.memory_format,
            )


@functools.cache
def preload_capture() -> None:
    """Import the many libraries of a capture, by capturing a tiny module."""
    capture(nn.Conv2d(1, 1, 1).eval(), torch.zeros(1, 1, 2, 2))


def _pareto_front(drafted: list[StreamLayout]) -> list[StreamLayout]:
    """Return a few drafts that no other draft beats in both memory and time."""
    front: list[StreamLayout] = []
    for one in sorted(drafted, key=lambda one: (one.peak_bytes, one.overhead_seconds)):
        if not front or one.overhead_seconds < front[-1].overhead_seconds:
            front.append(one)
    step = max(1, len(front) - 1) / max(1, min(_MAX_CANDIDATES, len(front)) - 1)
    places = {round(step * number) for number in range(min(_MAX_CANDIDATES, len(front)))}
    return [front[place] for place in sorted(places)]
