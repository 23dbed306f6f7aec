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
from lowtide.memory.profiles import profile_of
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.certificate import Certificate, certify, operators
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.pages.placement import placements
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run
from lowtide.streaming.planner.layout_search import SHARES, LayoutSearch, StreamLayout
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Sizes whose programs are kept: a folder of photographs has portrait and landscape ones, and wide
# images may run in panels.
_KEPT = 4
# Number of drafts that become candidates.
_FRONT = 8
# Seconds of capture, drafting, dry run and proof, per submodule.
_MODULE_SECONDS = 0.06


@dataclass
class _Known:
    program: StreamProgram | None = None
    refusal: str = ""
    drafter: LayoutSearch | None = None
    layouts: dict[bool, list[StreamLayout]] = field(default_factory=dict)
    operators: str = ""
    certificate: Certificate | None = None


class ProgramCache:
    """Captured programs of ``network``, one capture for each input size.

    ``on_capture`` is called before each capture, which takes seconds. Methods raise `ModelError`,
    always with the same reason, for a network that cannot be captured.
    """

    def __init__(self, network: NetworkSpec, on_capture: Callable[[], None] | None = None) -> None:
        self.network, self.on_capture = network, on_capture
        self._known: OrderedDict[tuple[int, int], _Known] = OrderedDict()

    @property
    def planning_seconds(self) -> float:
        """Estimated seconds to plan the first image of a size; 0 where there is no graph."""
        module = self.network.forward
        count = sum(1 for _ in module.modules()) if isinstance(module, nn.Module) else 0
        return _MODULE_SECONDS * count

    def of(self, height: int, width: int) -> StreamProgram:
        """Return the program for one image of this size."""
        known = self._find(height, width)
        if known.program is None:
            raise ModelError(known.refusal)
        return known.program

    def operators(self, height: int, width: int) -> str:
        """Return the digest of that program's operators."""
        known = self._find(height, width)
        if not known.operators:
            known.operators = operators(self.of(height, width))
        return known.operators

    def layouts(self, height: int, width: int, *, small: bool = False) -> list[StreamLayout]:
        """Return a few drafts on the Pareto front of memory and time.

        ``small`` adds those for scarce memory.
        """
        program, known = self.of(height, width), self._find(height, width)
        if small not in known.layouts:
            known.drafter = known.drafter or LayoutSearch(program)
            pace = known.drafter.pace
            caps = (*pace.small_caps, *pace.caps) if small else pace.caps
            pages = placements(torch.device(self.network.device), "auto")
            known.layouts[small] = _front(list(known.drafter.drafts(caps, pages, SHARES)))
        return known.layouts[small]

    def drafted(self, height: int, width: int, key: tuple[object, ...]) -> StreamLayout:
        """Return the layout among `layouts` with this key."""
        known = self._find(height, width).layouts
        return next(one for found in known.values() for one in found if one.key == key)

    def told(self, height: int, width: int, layout: StreamLayout) -> DryRunResult:
        """Return the dry run of a layout: the exact bytes of a run."""
        device = torch.device(self.network.device)
        profile = None if device.type == "cpu" else profile_of(str(device))
        return dry_run(self.of(height, width), layout, held=False, profile=profile)

    def certificate(self, height: int, width: int) -> Certificate:
        """Return the proof that bands reproduce the network, measured or from the cache.

        It is measured on a small image. Raises `ModelError` where the results differ.
        """
        program, known = self.of(height, width), self._find(height, width)
        if known.certificate is None:
            example = self._example(height, width)
            known.certificate = certify(self._module(), example, program, cache_folder())
        return known.certificate

    def _find(self, height: int, width: int) -> _Known:
        if (height, width) not in self._known:
            self._known[height, width] = self._capture(height, width)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end((height, width))
        return self._known[height, width]

    def _capture(self, height: int, width: int) -> _Known:
        if self.on_capture is not None:
            self.on_capture()
        try:
            program = lower_to_rows(capture(self._module(), self._example(height, width)))
        except ModelError as error:
            return _Known(refusal=error.message)
        finally:
            trim_heap(collect=True)  # half of the memory of a capture is garbage by now
        rows, like = program.rows[program.output], program.graph.nodes[program.output].like
        sides = (side * self.network.scale for side in (height, width))
        expected = (1, self.network.out_channels, *sides)
        if rows.dim != 2 or like.shape != expected:
            shape, wanted = ("×".join(map(str, sizes)) for sizes in (like.shape, expected))
            return _Known(refusal=f"its output for one image is {shape}, not {wanted}")
        return _Known(program)

    def _module(self) -> nn.Module:
        if not isinstance(self.network.forward, nn.Module):
            raise ModelError("a network that is not a torch.nn.Module has no graph to capture")
        return self.network.forward

    def _example(self, height: int, width: int) -> Tensor:
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


def _front(drafted: list[StreamLayout]) -> list[StreamLayout]:
    """Return a few drafts that no other draft beats in both memory and time."""
    front: list[StreamLayout] = []
    for one in sorted(drafted, key=lambda one: (one.bytes, one.overhead_seconds)):
        if not front or one.overhead_seconds < front[-1].overhead_seconds:
            front.append(one)
    step = max(1, len(front) - 1) / max(1, min(_FRONT, len(front)) - 1)
    places = {round(step * number) for number in range(min(_FRONT, len(front)))}
    return [front[place] for place in sorted(places)]
