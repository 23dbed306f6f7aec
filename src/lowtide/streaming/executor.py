"""The runner that obeys a Plan: rows in, tiles through the network, rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.rows import RowSink, RowSource
from lowtide.memory.plan import Plan
from lowtide.streaming.banded import run_banded
from lowtide.streaming.bands.programs import Programs
from lowtide.streaming.layout import Axis, split_axis
from lowtide.streaming.merge import StripMerger
from lowtide.streaming.recovery import ResilientStep
from lowtide.streaming.step import Network, TileStep
from lowtide.streaming.window import RowWindow


@dataclass
class Outcome:
    """What happened: tiles run, tiles redone in fp32, and anything that had to shrink."""

    tiles: int = 0
    redone: int = 0
    events: list[str] = field(default_factory=list)


def plan_axes(plan: Plan) -> tuple[Axis, Axis]:
    """The plan's tiles as (rows, columns)."""
    rows, columns = (
        split_axis(length, tile, plan.overlap, align=plan.align, blend=plan.blend)
        for length, tile in (
            (plan.padded_height, plan.tile_height),
            (plan.padded_width, plan.tile_width),
        )
    )
    return rows, columns


def run(
    network: Network,
    source: RowSource,
    sink: RowSink,
    plan: Plan,
    *,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    over_budget: Callable[[], bool] | None = None,
    programs: Programs | None = None,
    scratch: Path | None = None,
) -> Outcome:
    """Run the whole image by ``plan``, from ``source`` to ``sink`` (which is not committed).

    ``on_rows`` is told how many more output rows are written. ``over_budget`` is asked after
    each batch; while it says yes, batches shrink. A streamed plan needs ``programs`` of the
    network, and ``scratch`` is the folder of its pages on disk. Raises `Cancelled`,
    `OutOfMemoryError`, and whatever the source and the sink raise.
    """
    if plan.strategy == "streamed":
        run_banded(
            network, source, sink, plan, programs or Programs(network), scratch=scratch,
            on_rows=on_rows, cancel=cancel,
        )  # fmt: skip
        return Outcome(tiles=1)
    rows, columns = plan_axes(plan)
    step = TileStep(network, source.info)
    resilient = ResilientStep(step, plan, network.scale)
    window = RowWindow(source, plan.padded_height, plan.padded_width, rows.tile)
    size = (source.info.height, source.info.width)
    merger = StripMerger(rows, columns, step, sink, size, resilient.repeated)
    outcome = Outcome(events=resilient.events)
    for row, top in enumerate(rows.starts):
        strip = window.rows(top, top + rows.tile)
        column = 0
        while column < len(columns.starts):
            check_cancel(cancel)
            lefts = columns.starts[column : column + resilient.batch]
            tiles = [strip[:, left : left + columns.tile] for left in lefts]
            _merge(merger, row, column, resilient(tiles))
            column += len(tiles)
            outcome.tiles += len(tiles)
            if over_budget is not None and over_budget():
                resilient.shrink("over the budget")
        written = merger.finish(row)
        if on_rows is not None:
            on_rows(written)
    outcome.redone = step.redone
    return outcome


def _merge(merger: StripMerger, row: int, column: int, results: Sequence[Tensor]) -> None:
    """Put neighboring results in their places; none is held when the next ones are made."""
    for offset, tile in enumerate(results):
        merger.add(row, column + offset, tile)
