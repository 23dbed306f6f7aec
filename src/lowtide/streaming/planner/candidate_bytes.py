"""The candidates of one choice: how far they were searched, and the bytes known of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lowtide.memory.ledger import LedgerRow
from lowtide.streaming.planner.dry_run import DryRunResult, dry_run_seconds
from lowtide.streaming.planner.ledger_rows import ledger_row
from lowtide.streaming.planner.stream_layout import StreamLayout

if TYPE_CHECKING:
    from lowtide.streaming.planner.stream_planner import StreamPlanner

# Ratios of exact to drafted bytes differ by this much: what may fit is worth a dry run.
_LEAST_SHARE = 0.9


class CandidateBytes:
    """Bytes of a planner's candidates, as far as one choice knows them.

    Candidates are drafts: roughly estimated, until a dry run gives their exact bytes. Each dry run
    also corrects the estimates of the layouts that are most like its own. Those of other choices
    do not, so that a plan does not depend on what was planned before it.
    """

    def __init__(self, planner: StreamPlanner) -> None:
        self.planner = planner
        # By layout key: the draft, and its dry run.
        self._dry_runs: dict[object, tuple[StreamLayout, DryRunResult]] = {}
        # How many ways to cut the program were tried. What is planned without a run is the best.
        self._segmentations = 1 if planner.has_run else None

    def candidates(self, *, low_memory: bool = False) -> list[StreamLayout]:
        """Return the planner's candidates as far as they were searched, all with ``low_memory``."""
        if low_memory:
            self._segmentations = None
        return self.planner.candidates(low_memory=low_memory, segmentations=self._segmentations)

    def search_further(self, saved_seconds: float) -> bool:
        """Add the next candidates, unless the search takes longer than a better one may save.

        Returns whether any were added. What was stored counts as if it were found now, so that
        every process ends its search at the same candidates.
        """
        tried, search = self._segmentations, self.planner.search
        if tried is None or search.seconds(tried) >= saved_seconds or not search.has_more(tried):
            return False
        self._segmentations = tried + 1
        return True

    def unless_exact(self, chosen: StreamLayout, fitting: Sequence[StreamLayout]) -> StreamLayout:
        """Return ``chosen``, or one that had its dry run where another saves less than it takes."""
        exact = [one for one in fitting if self.known_dry_run(one)]
        known = min(exact, key=lambda one: one.cost, default=chosen)
        saved = known.cost - chosen.cost
        return chosen if saved > dry_run_seconds(chosen) else known

    def dry_run(self, layout: StreamLayout) -> None:
        """Make the dry run of a candidate count from now on."""
        self._dry_runs[layout.key] = layout, self.planner.dry_run(layout)

    def known_dry_run(self, layout: StreamLayout) -> DryRunResult | None:
        """Return the dry run of a candidate if it was made."""
        _, found = self._dry_runs.get(layout.key, (layout, None))
        return found

    def expected(self, layout: StreamLayout) -> int:
        """Return the bytes to expect of a candidate, exact after its dry run.

        A draft is corrected as the dry run with the most similar bands corrected its own: the ratio
        is about the same where bands are equally high. What exceeds a draft is mostly workspace of
        operators, which is a smaller part of lower bands.
        """
        held = self.planner.held_bytes(layout)
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
        ratio, lower = found.peak_bytes / other.peak_bytes, max(other.bands) / height
        share = _LEAST_SHARE * (1 + max(0, ratio - 1) * min(1, lower**2))
        return held + int(share * layout.peak_bytes)

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
        for one in self.planner.candidates(low_memory=True):
            if self.known_dry_run(one) is None:
                yield one, self.planner.held_bytes(one) + int(one.peak_bytes * _LEAST_SHARE)
