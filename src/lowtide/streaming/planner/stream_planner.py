"""Planner of streamed runs: candidate layouts, their dry runs, and the choice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor, nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.memory.profiles import DeviceProfile, local_profile
from lowtide.streaming.capture.autocast_state import no_autocast
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import Certificate, certify
from lowtide.streaming.engine.placement import PagePlacement, allowed_placements
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.candidate_bytes import CandidateBytes
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run
from lowtide.streaming.planner.exact_choice import choose_exact
from lowtide.streaming.planner.layout_search import RESIDENT_SHARES, LayoutSearch
from lowtide.streaming.planner.stream_layout import StreamLayout

# Two candidates differ by at least this share of their bytes.
_STEP = 0.08
# Bytes held outside of the bands of a layout (program, segments, bands).
HeldBytes = Callable[[StreamProgram, Sequence[Segment], Sequence[int]], int]


class StreamPlanner:
    """Candidates of how a module runs in bands for inputs like one example, and their dry runs.

    Args:
        module: The module to run.
        inputs: Example of the arguments, or of an image alone; may be fake tensors.
        pages: Where pages may be kept.
        whole_image: Whether image and result are held whole, and count.
        held: Returns the bytes held outside of the bands for a layout (program, segments, bands),
            which count in addition.
        program: Program of the module for such inputs, if it is known; by default it is captured.
        profile: Device to plan for, which need not be present; by default that of the inputs.
        before_computing: Called before a dry run is made or a proof measured that is not stored.

    Raises:
        ModelError: The module cannot be captured.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Tensor | ModelInputs,
        *,
        pages: PagePlacement = "auto",
        whole_image: bool = True,
        held: HeldBytes | None = None,
        program: StreamProgram | None = None,
        profile: DeviceProfile | None = None,
        before_computing: Callable[[], None] = lambda: None,
    ) -> None:
        self.inputs = ModelInputs.of(inputs)
        self.program = program or lower_to_rows(capture(module, self.inputs))
        self.module, self._device = module, self.inputs.first.device
        self._pages: PagePlacement = pages
        self._whole_image, self._held = whole_image, held
        self._profile, self._before_computing = profile, before_computing
        self._candidates: dict[tuple[bool, int | None], list[StreamLayout]] = {}
        self._dry_runs: dict[object, DryRunResult] = {}
        # On a CPU, the budget: planning that takes more warns before.
        self.budget_bytes: int | None = None

    @cached_property
    def search(self) -> LayoutSearch:
        """The search for layouts of the program."""
        return LayoutSearch(self.program, self._profile)

    @cached_property
    def certificate(self) -> Certificate:
        """The proof that bands reproduce the module, measured on a small image or cached.

        Raises `ModelError` where the results differ.
        """
        return certify(
            self.module,
            self.inputs,
            self.program,
            budget_bytes=self.budget_bytes,
            before_computing=self._before_computing,
        )

    def candidates(
        self, *, low_memory: bool = False, segmentations: int | None = None
    ) -> list[StreamLayout]:
        """Return drafts on the Pareto front of memory and time, smallest first.

        ``low_memory`` adds those for scarce memory. Of the ways to cut the program, all are tried,
        or only the first ``segmentations``.
        """
        key = low_memory, segmentations
        if key not in self._candidates:
            model = self.search.cost_model
            caps = (*model.low_memory_caps, *model.caps) if low_memory else model.caps
            places = allowed_placements(self._device, self._pages)
            shares = RESIDENT_SHARES if self._pages == "auto" else ()
            self._candidates[key] = _pareto_front(
                list(self.search.drafts(caps, places, shares, segmentations))
            )
        return self._candidates[key]

    @property
    def has_run(self) -> bool:
        """Whether the device is here, so that a run follows which a search must not outlast."""
        return self._profile is None

    def with_held(self, held: HeldBytes | None) -> StreamPlanner:
        """Return a planner for bands with other bytes held, with all that is known here."""
        changed = copy.copy(self)
        changed._held = held
        return changed

    @property
    def least_draft_bytes(self) -> int:
        """Bytes of the smallest draft, with what else is held."""
        drafts = self.candidates(low_memory=True)
        return min(one.peak_bytes + self.held_bytes(one) for one in drafts)

    def held_bytes(self, layout: StreamLayout) -> int:
        """Return the bytes held outside of the bands of a candidate."""
        return 0 if self._held is None else self._held(self.program, layout.segments, layout.bands)

    def layout(self, key: object) -> StreamLayout:
        """Return the candidate with this key."""
        known = self._candidates.values()
        return next(one for found in known for one in found if one.key == key)

    def dry_run(self, layout: StreamLayout) -> DryRunResult:
        """Return the dry run of a candidate: the exact bytes of a run."""
        if layout.key not in self._dry_runs:
            device, profile = self._device, self._profile
            if profile is None and device.type != "cpu":
                profile = local_profile(str(device))
            with no_autocast(device.type):
                self._dry_runs[layout.key] = dry_run(
                    self.program,
                    layout,
                    whole_image=self._whole_image,
                    profile=profile,
                    before_computing=self._before_computing,
                )
        return self._dry_runs[layout.key]

    def choose(self, limit_bytes: int, most_bytes: int | None = None) -> StreamLayout:
        """Return the layout of least cost whose exact bytes are within ``limit_bytes``.

        Where none is, the smallest, if that is within ``most_bytes``.

        Raises:
            BudgetError: No layout fits; the message names the least bytes that any layout takes.
        """
        bytes_of = CandidateBytes(self)

        def best(low_memory: bool) -> StreamLayout:
            while True:
                layouts = bytes_of.candidates(low_memory=low_memory)
                fitting = [one for one in layouts if bytes_of.expected(one) <= limit_bytes]
                chosen = min(fitting, key=lambda one: one.cost, default=None)
                if not bytes_of.search_further(chosen.overhead_seconds if chosen else math.inf):
                    break
            if chosen is not None:
                return bytes_of.unless_exact(chosen, fitting)
            least = min(map(bytes_of.expected, layouts))
            raise BudgetError(
                f"bands of this model need at least {format_bytes(least)}, and the limit is"
                f" {format_bytes(limit_bytes)}",
                smallest=least,
            )

        def last_resort() -> StreamLayout:
            hopeful = (one for one, size in bytes_of.untried() if size <= limit_bytes)
            smallest = min(self.candidates(low_memory=True), key=bytes_of.expected)
            return next(hopeful, smallest)

        try:
            chosen = choose_exact(best, last_resort, bytes_of.known_dry_run, bytes_of.dry_run)
        except BudgetError as error:
            if most_bytes is None or (error.smallest or math.inf) > most_bytes:
                raise
            chosen = min(self.candidates(low_memory=True), key=bytes_of.expected)
        return replace(chosen, peak_bytes=bytes_of.expected(chosen))


def _pareto_front(drafts: list[StreamLayout]) -> list[StreamLayout]:
    """Return the drafts that no other draft beats in both memory and time.

    Of those that take about the same memory, the fastest; the smallest of all stays.
    """
    front: list[StreamLayout] = []
    for one in sorted(drafts, key=lambda one: (one.peak_bytes, one.overhead_seconds)):
        if front and one.overhead_seconds >= front[-1].overhead_seconds:
            continue
        if len(front) > 1 and one.peak_bytes < (1 + _STEP) * front[-2].peak_bytes:
            front.pop()
        front.append(one)
    return front
