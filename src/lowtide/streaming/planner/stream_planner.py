"""Planner of streamed runs: candidate layouts, their dry runs, and the choice.

Candidates are drafts: roughly estimated, until a dry run gives their exact bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor, nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.memory.plan import LedgerRow
from lowtide.memory.profiles import DeviceProfile, local_profile
from lowtide.streaming.capture.autocast_state import no_autocast
from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.capture.model_inputs import ModelInputs
from lowtide.streaming.certificate import StreamCertificate, certify
from lowtide.streaming.engine.placement import PagePlacement, allowed_placements
from lowtide.streaming.engine.program import StreamProgram, lower_to_rows
from lowtide.streaming.engine.segments import ProgramSegment
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run
from lowtide.streaming.planner.layout_search import (
    CAPS,
    RESIDENT_SHARES,
    StreamLayout,
    draft_layouts,
)
from lowtide.streaming.planner.ledger_rows import ledger_row

# Two candidates differ by at least this share of their bytes.
_STEP = 0.08
# Times the calls of the smallest candidate, for that of lower bands: a dry run takes as long as it
# has calls.
_MORE_CALLS = 2
# Ratios of exact to drafted bytes differ by this much: what may fit is worth a dry run.
_LEAST_SHARE = 0.9
# Bytes held outside of the bands of a layout (program, segments, bands).
HeldBytes = Callable[[StreamProgram, Sequence[ProgramSegment], Sequence[int]], int]
_Candidate = TypeVar("_Candidate")


class StreamPlanner:
    """Candidates of how a module runs in bands for inputs like one example, and their dry runs.

    Args:
        module: The module to run.
        inputs: Example of the arguments, or of an image alone; may be fake tensors.
        pages: Where pages may be kept.
        whole_image: Whether image and result are held whole, and count.
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
        program: StreamProgram | None = None,
        profile: DeviceProfile | None = None,
        before_computing: Callable[[], None] = lambda: None,
    ) -> None:
        self.inputs = ModelInputs.of(inputs)
        self.program = program or lower_to_rows(capture_graph(module, self.inputs))
        self.module, self._device = module, self.inputs.first.device
        self._pages: PagePlacement = pages
        self._whole_image, self._profile = whole_image, profile
        self._before_computing = before_computing
        self._dry_runs: dict[object, DryRunResult] = {}
        # On a CPU, the budget: planning that takes more warns before.
        self.budget_bytes: int | None = None

    @cached_property
    def certificate(self) -> StreamCertificate:
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

    @cached_property
    def candidates(self) -> list[StreamLayout]:
        """Drafts on the Pareto front of memory and time, smallest first."""
        places = allowed_placements(self._device, self._pages)
        shares = RESIDENT_SHARES if self._pages == "auto" else ()
        return _pareto_front([*draft_layouts(self.program, CAPS, places, shares, self._profile)])

    def layout(self, key: object) -> StreamLayout:
        """Return the candidate with this key."""
        return next(one for one in self.candidates if one.key == key)

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

    def choose(self, limit_bytes: int, held: HeldBytes | None = None) -> StreamLayout:
        """Return the layout of least cost whose exact bytes are within ``limit_bytes``.

        Args:
            limit_bytes: The limit.
            held: Returns the bytes held outside of the bands for a layout (program, segments,
                bands), which count in addition.

        Raises:
            BudgetError: No layout fits; the message names the least bytes that any layout takes.
        """
        bytes_of = CandidateBytes(self, held)

        def best() -> StreamLayout:
            sizes = {one.key: bytes_of.expected(one) for one in self.candidates}
            fitting = [one for one in self.candidates if sizes[one.key] <= limit_bytes]
            if fitting:
                return min(fitting, key=lambda one: one.cost)
            least = min(sizes.values())
            raise BudgetError(
                f"bands of this model need at least {format_bytes(least)}, and the limit is"
                f" {format_bytes(limit_bytes)}",
                smallest=least,
            )

        def last_resort() -> StreamLayout:
            hopeful = (one for one, size in bytes_of.untried() if size <= limit_bytes)
            return next(hopeful, None) or min(
                self.candidates,
                key=lambda one: (bytes_of.expected(one), bytes_of.known_dry_run(one) is not None),
            )

        chosen = choose_exact(best, last_resort, bytes_of.known_dry_run, bytes_of.dry_run)
        return replace(chosen, peak_bytes=bytes_of.expected(chosen))


def _pareto_front(drafts: list[StreamLayout]) -> list[StreamLayout]:
    """Return the drafts that no other draft beats in both memory and time, smallest first.

    Of those that take about the same memory, the fastest; the smallest of all stays. One of lower
    bands and as few bytes does too: its operators may take less than drafts tell.
    """
    front: list[StreamLayout] = []
    for one in sorted(drafts, key=lambda one: (one.peak_bytes, one.overhead_seconds)):
        if front and one.overhead_seconds >= front[-1].overhead_seconds:
            continue
        if len(front) > 1 and one.peak_bytes < (1 + _STEP) * front[-2].peak_bytes:
            front.pop()
        front.append(one)
    most = _MORE_CALLS * front[0].calls
    equal = [one for one in drafts if one.peak_bytes == front[0].peak_bytes and one.calls <= most]
    lowest = max(equal, key=lambda one: one.calls)
    return front if lowest.key == front[0].key else [front[0], lowest, *front[1:]]


class CandidateBytes:
    """Bytes of a planner's candidates, as far as one choice knows them.

    Each dry run also corrects the estimates of the layouts that are most like its own. Those of
    other choices do not, so that a plan does not depend on what was planned before it.
    """

    def __init__(self, planner: StreamPlanner, held: HeldBytes | None = None) -> None:
        self.planner, self._held = planner, held
        # By layout key: the draft, and its dry run.
        self._dry_runs: dict[object, tuple[StreamLayout, DryRunResult]] = {}

    def dry_run(self, layout: StreamLayout) -> None:
        """Make the dry run of a candidate count from now on."""
        self._dry_runs[layout.key] = layout, self.planner.dry_run(layout)

    def known_dry_run(self, layout: StreamLayout) -> DryRunResult | None:
        """Return the dry run of a candidate if it was made."""
        _, found = self._dry_runs.get(layout.key, (layout, None))
        return found

    def expected(self, layout: StreamLayout) -> int:
        """Return the bytes to expect of a candidate, exact after its dry run.

        A draft is corrected as the dry run with the most similar bands corrected its own. What
        exceeds a draft is workspaces of operators: of some the same for all bands, of others
        smaller where bands are lower.
        """
        held = self._held_bytes(layout)
        if known := self.known_dry_run(layout):
            return held + known.peak_bytes
        if not self._dry_runs:
            return held + int(_LEAST_SHARE * layout.peak_bytes)
        height = max(layout.bands)
        other, found = min(
            self._dry_runs.values(),
            key=lambda one: (
                abs(math.log(max(one[0].bands) / height)),
                one[0].placement != layout.placement,
                abs(one[0].peak_bytes - layout.peak_bytes),
            ),
        )
        beyond = found.peak_bytes - other.peak_bytes
        beyond *= math.sqrt(layout.peak_bytes / other.peak_bytes)
        return held + int(max(_LEAST_SHARE * layout.peak_bytes, layout.peak_bytes + beyond))

    def _held_bytes(self, layout: StreamLayout) -> int:
        if self._held is None:
            return 0
        return self._held(self.planner.program, layout.segments, layout.bands)

    def rows(self, layout: StreamLayout, size: int | None = None) -> tuple[LedgerRow, ...]:
        """Return the ledger rows to expect of a candidate, or of ``size`` bytes for bands."""
        if known := self.known_dry_run(layout):
            return known.rows
        size = size or self.expected(layout)
        # What libraries set up is the same for every layout.
        others = next((found.rows for _, found in self._dry_runs.values()), ())
        return (
            ledger_row("bands and pages", "device", size, size, "prior"),
            *(row for row in others if row.name == "runtime"),
        )

    def untried(self) -> Iterator[tuple[StreamLayout, int]]:
        """Yield the drafts without a dry run, smallest first, and the least they may take."""
        for one in self.planner.candidates:
            if self.known_dry_run(one) is None:
                yield one, self._held_bytes(one) + int(one.peak_bytes * _LEAST_SHARE)


def choose_exact(
    best: Callable[[], _Candidate],
    last_resort: Callable[[], _Candidate],
    is_exact: Callable[[_Candidate], object],
    dry_run: Callable[[_Candidate], object],
) -> _Candidate:
    """Return the candidate that is best once its bytes are exact.

    Drafts are dry-run one by one, as each may make another the best. Where none fits, those that
    only a correction rules out are tried, so that the bytes that an error names suffice.

    Args:
        best: The best by what is known; raises `BudgetError` where none fits.
        last_resort: The one to try where none fits: that only a correction rules out, or else the
            smallest.
        is_exact: Whether a candidate is more than a draft.
        dry_run: Makes a draft exact.

    Raises:
        BudgetError: No candidate fits; that of ``best``, where the smallest is exact.
    """
    while True:
        failure = None
        try:
            chosen = best()
        except BudgetError as error:
            failure, chosen = error, last_resort()
        if not is_exact(chosen):
            dry_run(chosen)
        elif failure is not None:
            raise failure
        else:
            return chosen
