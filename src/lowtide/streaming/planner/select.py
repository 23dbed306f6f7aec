"""Selection of the layout that a program runs with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.planner.layout_search import RESIDENT_SHARES, LayoutSearch, StreamLayout

# Largest ratio of a layout's exact bytes to its draft's.
MAX_DRAFT_RATIO = 1.4
# Smallest usual ratio of a layout's exact bytes to its draft's.
_MIN_DRAFT_RATIO = 0.87
# Spread of that ratio among layouts of one program: small where band heights are equal, smallest
# where several such layouts were measured, somewhat larger where pages are in other places.
_SPREAD, _SPREAD_OTHER_PLACEMENT, _SPREAD_SEVERAL = 0.03, 0.07, 0.01
_SEVERAL, _SAME_BYTES = 2, 0.01
# In the last round a spread of twice as much is assumed.
_LAST_ROUND = 2


def select_layout(
    program: StreamProgram,
    limit_bytes: int | None,
    dry_run_bytes: Callable[[StreamLayout], int],
    placements: Sequence[Placement] = ("memory", "disk"),
    *,
    partial_spill: bool = False,
) -> StreamLayout:
    """Return the layout of least cost whose rows fit in ``limit_bytes``.

    Drafts are passed to ``dry_run_bytes`` in the order of their cost.

    Args:
        program: The captured program.
        limit_bytes: Bytes for rows; None for no limit.
        dry_run_bytes: Returns the exact bytes of a layout, by a dry run.
        placements: Places for pages.
        partial_spill: Keep as many pages in memory as fit and spill the others.

    Raises:
        BudgetError: No layout fits; the message names the least bytes that any layout takes.
    """
    drafter, failed = LayoutSearch(program), list[tuple[StreamLayout, int]]()
    drafts: list[StreamLayout] = []
    cost_model = drafter.cost_model
    # The last round tries drafts skipped before, unless measured ones clearly rule them out.
    rounds = (
        (cost_model.caps, _MIN_DRAFT_RATIO),
        (cost_model.low_memory_caps, _MIN_DRAFT_RATIO),
        ((), 1 / MAX_DRAFT_RATIO),
    )
    for caps, least in rounds:
        more = (
            drafter.drafts(caps, placements, RESIDENT_SHARES if partial_spill else ())
            if caps
            else ()
        )
        drafts = sorted([*drafts, *more], key=lambda one: one.cost)
        passed = list[StreamLayout]()
        for draft in drafts:
            part = max(least, _expected_ratio(draft, failed, 1 if caps else _LAST_ROUND))
            if limit_bytes is not None and draft.peak_bytes * part > limit_bytes:
                passed.append(draft)
                continue
            layout = replace(draft, peak_bytes=dry_run_bytes(draft))
            if limit_bytes is None or layout.peak_bytes <= limit_bytes:
                return layout
            failed.append((draft, layout.peak_bytes))
        drafts = passed
    smallest = _smallest_untried(failed, drafts)
    if smallest is not None:
        layout = replace(smallest, peak_bytes=dry_run_bytes(smallest))
        if layout.peak_bytes <= (limit_bytes or 0):  # without a limit the first layout was returned
            return layout
        failed.append((smallest, layout.peak_bytes))
    size = min(size for _, size in failed)
    raise BudgetError(
        f"bands of this model need at least {format_bytes(size)}, and the limit is"
        f" {format_bytes(limit_bytes or 0)}",
        smallest=size,
    )


def _expected_ratio(
    draft: StreamLayout, failed: Sequence[tuple[StreamLayout, int]], spread_factor: float
) -> float:
    """Return the least ratio of exact to drafted bytes to expect of a draft.

    Derived from the layout, among those that took too much, whose bands are most like the draft's;
    0 where nothing is known. The ratios of the two may differ by ``spread_factor`` times the usual
    spread. What exceeds a draft is mostly workspace of operators, which is a smaller part of lower
    bands.
    """
    if not failed:
        return 0.0
    twins = [took / one.peak_bytes for one, took in failed if _is_similar(one, draft)]
    if len(twins) >= _SEVERAL:
        return (1 - spread_factor * _SPREAD_SEVERAL) * min(twins)
    height = math.log(max(draft.bands))
    other, took = min(
        failed,
        key=lambda one: (
            abs(math.log(max(one[0].bands)) - height),
            one[0].placement != draft.placement,
            abs(one[0].peak_bytes - draft.peak_bytes),
        ),
    )
    ratio, lower = took / other.peak_bytes, max(other.bands) / max(draft.bands)
    spread = _SPREAD if other.placement == draft.placement else _SPREAD_OTHER_PLACEMENT
    return (1 - spread_factor * spread) * (
        1 + (ratio - 1) * min(1.0, lower**2) if ratio > 1 else ratio
    )


def _is_similar(one: StreamLayout, other: StreamLayout) -> bool:
    """Return whether both have equal band height, page place and about equal bytes."""
    apart = abs(one.peak_bytes - other.peak_bytes)
    return (
        max(one.bands) == max(other.bands)
        and one.placement == other.placement
        and apart <= _SAME_BYTES * other.peak_bytes
    )


def _smallest_untried(
    failed: Sequence[tuple[StreamLayout, int]], drafts: Sequence[StreamLayout]
) -> StreamLayout | None:
    """Return the smallest draft, unless a smaller one was already measured.

    Not every small draft, since the dry run of low bands takes seconds.
    """
    smallest = min(drafts, key=lambda one: one.peak_bytes, default=None)
    least = min((told.peak_bytes for told, _ in failed), default=math.inf)
    return smallest if smallest is not None and smallest.peak_bytes < least else None
