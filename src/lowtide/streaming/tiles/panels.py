"""Wide images by the strategy `streamed`: panels side by side, one after another.

Rows that a network holds between bands are as long as the image is wide. Of an image in panels
they are as long as a panel, and what grows with the image lies on disk: the panels' shares of the
file, read once, and their results, until all are there to be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.scratch import ScratchFile, ScratchSpace
from lowtide.core.signal import ImageInfo, RowSource, RowWriter
from lowtide.memory.plan import Plan
from lowtide.streaming.engine.run_rows import RowProgress, run_streamed
from lowtide.streaming.planner.program_cache import ProgramCache
from lowtide.streaming.tiles.grid import TileAxis, split_axis
from lowtide.streaming.tiles.row_window import read_rows
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Rows that go from file to file at once.
MOVED_ROWS = 16


def panel_columns(plan: Plan) -> TileAxis:
    """Where the panels of a streamed plan lie; one where it has none."""
    return split_axis(plan.padded_width, plan.tile_width, plan.overlap, align=plan.align)


def run_panels(
    network: NetworkSpec,
    source: RowSource,
    sink: RowWriter,
    plan: Plan,
    programs: ProgramCache,
    *,
    scratch: ScratchSpace,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """As `run_streamed`, panel by panel; ``source`` is closed before the first. Raises what that
    does, and `OutputError` when the disk of ``scratch`` is full."""
    columns = panel_columns(plan)
    told, done = RowProgress(plan.height * plan.scale, on_rows), 0

    def more(rows: int) -> None:
        """So many rows of one panel."""
        nonlocal done
        done += rows
        told.up_to(done // len(columns.starts))

    with ExitStack() as files:
        panels = [
            files.enter_context(RowFile(_part(source.info, width), scratch.folder))
            for _, width in _shares(columns, source.info.width)
        ]
        _deal(source, panels, columns, cancel)
        # What its decoder holds would be there beside every panel.
        source.close()
        trim_heap(collect=True)
        made = list[RowFile]()
        for index, panel in enumerate(panels):
            low, high = columns.span(index)
            wanted = min(high, plan.width) - low
            result = RowFile(_part(source.info, wanted * plan.scale), scratch.folder)
            made.append(files.enter_context(result))
            left = (low - columns.starts[index]) * plan.scale
            run_streamed(
                network,
                panel,
                _PanelSink(result, left),
                _narrow(plan, panel.info.width),
                programs,
                scratch=scratch,
                on_rows=more,
                cancel=cancel,
                before_step=before_step,
            )
            panel.close()
            # Blocks of the next one do not fit the gaps that this one's left.
            trim_heap(collect=True)
        _join(made, sink, plan.height * plan.scale, cancel)
    told.all()


def _shares(columns: TileAxis, width: int) -> list[tuple[int, int]]:
    """(first column, columns) of each panel in the file; padding is made anew."""
    return [(start, min(columns.tile, width - start)) for start in columns.starts]


def _part(info: ImageInfo, width: int) -> ImageInfo:
    return ImageInfo(width, info.height, info.bands, info.sample)


def _narrow(plan: Plan, width: int) -> Plan:
    """The plan of one panel, ``width`` columns of which are in the file."""
    return plan.model_copy(update={"width": width, "padded_width": plan.tile_width})


def _deal(source: RowSource, panels: Sequence[RowFile], columns: TileAxis, cancel: Cancel) -> None:
    """Give each panel its share of every row."""
    shares = _shares(columns, source.info.width)
    done = 0
    while done < source.info.height:
        check_cancel(cancel)
        rows = read_rows(source, done, MOVED_ROWS)
        for (left, width), panel in zip(shares, panels, strict=True):
            panel.write(rows[:, left : left + width])
        done += len(rows)


def _join(made: Sequence[RowFile], sink: RowWriter, height: int, cancel: Cancel) -> None:
    for top in range(0, height, MOVED_ROWS):
        check_cancel(cancel)
        count = min(MOVED_ROWS, height - top)
        sink.write(np.concatenate([panel.read(count) for panel in made], axis=1))


class RowFile:
    """Rows in a scratch file, read from the top once they are written."""

    def __init__(self, info: ImageInfo, folder: Path | None) -> None:
        """``info`` is what a row is; how many there are is left open."""
        self.info = info
        self._file = ScratchFile(folder)
        self._written = self._read = 0

    def write(self, rows: np.ndarray) -> None:
        """Append rows, shape (n, width, bands)."""
        data = np.ascontiguousarray(rows)
        self._file.put(self._written * self.info.row_bytes, data.data.cast("B"))
        self._written += len(rows)

    def read(self, count: int) -> np.ndarray:
        """The next ``count`` rows, fewer only at the end."""
        count = min(count, self._written - self._read)
        rows = np.empty((count, self.info.width, self.info.bands), self.info.sample)
        if count:
            self._file.get(self._read * self.info.row_bytes, rows.data.cast("B"))
        self._read += count
        return rows

    def close(self) -> None:
        """Give the disk space back; may be called more than once."""
        self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _PanelSink:
    """Takes a panel's results, and passes on those that are its own: from ``left`` on, as many as
    ``target`` is wide."""

    def __init__(self, target: RowFile, left: int) -> None:
        self._target, self._left = target, left

    def write(self, rows: np.ndarray) -> None:
        self._target.write(rows[:, self._left : self._left + self._target.info.width])
