"""Selection of the layout that a program runs with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.pages.placement import Placement
from lowtide.streaming.planner.layout_search import SHARES, LayoutSearch, StreamLayout

# Largest ratio of a layout's exact bytes to its draft's.
DRAFTED_WITHIN = 1.4
# Smallest usual ratio of a layout's exact bytes to its draft's.
_AT_LEAST = 0.87
# Spread of that ratio among layouts of one program: small where band heights are equal, smallest
# where several such layouts were measured, somewhat larger where pages are in other places.
_APART, _APART_ELSEWHERE, _APART_OF_SEVERAL = 0.03, 0.07, 0.01
_SEVERAL, _SAME_BYTES = 2, 0.01
# In the last round a spread of twice as much is assumed.
_LAST_ROUND = 2


def select_layout(
    program: StreamProgram,
    limit_bytes: int | None,
    tell: Callable[[StreamLayout], int],
    pages: Sequence[Placement] = ("memory", "disk"),
    *,
    mixed: bool = False,
) -> StreamLayout:
    """Return the layout of least cost whose rows fit in ``limit_bytes``.

    Drafts are passed to ``tell`` in the order of their cost.

    Args:
        program: The captured program.
        limit_bytes: Bytes for rows; None for no limit.
        tell: Returns the exact bytes of a layout, by a dry run.
        pages: Places for pages.
        mixed: Keep as many pages in memory as fit and spill the others.

    Raises:
        BudgetError: No layout fits; the message names the least bytes that any layout takes.
    """
    drafter, failed = LayoutSearch(program), list[tuple[StreamLayout, int]]()
    drafts: list[StreamLayout] = []
    pace = drafter.pace
    # The last round tries drafts skipped before, unless measured ones clearly rule them out.
    rounds = (pace.caps, _AT_LEAST), (pace.small_caps, _AT_LEAST), ((), 1 / DRAFTED_WITHIN)
    for caps, least in rounds:
        more = drafter.drafts(caps, pages, SHARES if mixed else ()) if caps else ()
        drafts = sorted([*drafts, *more], key=lambda one: one.cost)
        passed = list[StreamLayout]()
        for draft in drafts:
            part = max(least, _expected(draft, failed, 1 if caps else _LAST_ROUND))
            if limit_bytes is not None and draft.bytes * part > limit_bytes:
                passed.append(draft)
                continue
            layout = replace(draft, bytes=tell(draft))
            if limit_bytes is None or layout.bytes <= limit_bytes:
                return layout
            failed.append((draft, layout.bytes))
        drafts = passed
    smallest = _untold(failed, drafts)
    if smallest is not None:
        layout = replace(smallest, bytes=tell(smallest))
        if layout.bytes <= (limit_bytes or 0):  # without a limit the first layout was returned
            return layout
        failed.append((smallest, layout.bytes))
    size = min(size for _, size in failed)
    raise BudgetError(
        f"bands of this model need at least {format_bytes(size)}, and the limit is"
        f" {format_bytes(limit_bytes or 0)}",
        smallest=size,
    )


def _expected(
    draft: StreamLayout, failed: Sequence[tuple[StreamLayout, int]], doubt: float
) -> float:
    """Return the least ratio of exact to drafted bytes to expect of a draft.

    Derived from the layout, among those that took too much, whose bands are most like the draft's;
    0 where nothing is known. The ratios of the two may differ by ``doubt`` times the usual spread.
    What exceeds a draft is mostly workspace of operators, which is a smaller part of lower bands.
    """
    if not failed:
        return 0.0
    twins = [took / one.bytes for one, took in failed if _same(one, draft)]
    if len(twins) >= _SEVERAL:
        return (1 - doubt * _APART_OF_SEVERAL) * min(twins)
    height = math.log(max(draft.bands))
    other, took = min(
        failed,
        key=lambda one: (
            abs(math.log(max(one[0].bands)) - height),
            one[0].pages != draft.pages,
            abs(one[0].bytes - draft.bytes),
        ),
    )
    times, lower = took / other.bytes, max(other.bands) / max(draft.bands)
    apart = _APART if other.pages == draft.pages else _APART_ELSEWHERE
    return (1 - doubt * apart) * (1 + (times - 1) * min(1.0, lower**2) if times > 1 else times)


def _same(one: StreamLayout, other: StreamLayout) -> bool:
    """Return whether both have equal band height, page place and about equal bytes."""
    apart = abs(one.bytes - other.bytes)
    return (
        max(one.bands) == max(other.bands)
        and one.pages == other.pages
        and apart <= _SAME_BYTES * other.bytes
    )


def _untold(
    failed: Sequence[tuple[StreamLayout, int]], drafts: Sequence[StreamLayout]
) -> StreamLayout | None:
    """Return the smallest draft, unless a smaller one was already measured.

    Not every small draft, since the dry run of low bands takes seconds.
    """
    smallest = min(drafts, key=lambda one: one.bytes, default=None)
    least = min((told.bytes for told, _ in failed), default=math.inf)
    return smallest if smallest is not None and smallest.bytes < least else None
