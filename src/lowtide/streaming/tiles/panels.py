"""Streamed execution of wide images in vertical panels, one after another.

Rows that a network holds between bands are as long as the image is wide; in panels, as long as a
panel. What grows with the image is on disk: the panels' shares of the file, read once, and their
results, until all of them can be joined.
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
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.tiles.grid import TileAxis, split_axis
from lowtide.streaming.tiles.row_window import read_rows
from lowtide.streaming.tiles.run_rows import RowProgress, run_streamed
from lowtide.streaming.tiles.tile_step import NetworkSpec

# Rows copied from file to file at once.
COPY_ROWS = 16


def panel_columns(plan: Plan) -> TileAxis:
    """Return the column grid of a streamed plan's panels; one panel where it has none."""
    return split_axis(plan.padded_width, plan.tile_width, plan.overlap, align=plan.align)


def run_panels(
    network: NetworkSpec,
    program: StreamProgram,
    source: RowSource,
    sink: RowWriter,
    plan: Plan,
    *,
    scratch: ScratchSpace,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """Run a streamed plan panel by panel, otherwise as `run_streamed`.

    ``source`` is closed before the first panel runs. Raises what `run_streamed` does, and
    `OutputError` when the disk of ``scratch`` is full.
    """
    columns = panel_columns(plan)
    progress, done = RowProgress(plan.height * plan.scale, on_rows), 0

    def more(rows: int) -> None:
        """Count finished rows of one panel."""
        nonlocal done
        done += rows
        progress.advance_to(done // len(columns.starts))

    with ExitStack() as files:
        panels = [
            files.enter_context(RowFile(_with_width(source.info, width), scratch.folder))
            for _, width in _panel_spans(columns, source.info.width)
        ]
        _split_into_panels(source, panels, columns, cancel)
        # The memory of its decoder would stay allocated while every panel runs.
        source.close()
        trim_heap(collect=True)
        results = list[RowFile]()
        for index, panel in enumerate(panels):
            low, high = columns.span(index)
            owned_width = min(high, plan.width) - low
            result = RowFile(_with_width(source.info, owned_width * plan.scale), scratch.folder)
            results.append(files.enter_context(result))
            left = (low - columns.starts[index]) * plan.scale
            run_streamed(
                network,
                program,
                panel,
                _PanelSink(result, left),
                _panel_plan(plan, panel.info.width),
                scratch=scratch,
                on_rows=more,
                cancel=cancel,
                before_step=before_step,
            )
            panel.close()
            # Blocks of the next panel do not fit the gaps that this one left.
            trim_heap(collect=True)
        _join_panels(results, sink, plan.height * plan.scale, cancel)
    progress.finish()


def _panel_spans(columns: TileAxis, width: int) -> list[tuple[int, int]]:
    """Return (first column, columns) of each panel in the file.

    Padding is not included; it is created again.
    """
    return [(start, min(columns.tile, width - start)) for start in columns.starts]


def _with_width(info: ImageInfo, width: int) -> ImageInfo:
    return ImageInfo(width, info.height, info.channels, info.sample_type)


def _panel_plan(plan: Plan, width: int) -> Plan:
    """Return the plan of one panel, ``width`` columns of which are in the file."""
    return plan.model_copy(update={"width": width, "padded_width": plan.tile_width})


def _split_into_panels(
    source: RowSource, panels: Sequence[RowFile], columns: TileAxis, cancel: Cancel
) -> None:
    """Write each panel's columns of every row to its file."""
    shares = _panel_spans(columns, source.info.width)
    done = 0
    while done < source.info.height:
        check_cancel(cancel)
        rows = read_rows(source, done, COPY_ROWS)
        for (left, width), panel in zip(shares, panels, strict=True):
            panel.write(rows[:, left : left + width])
        done += len(rows)


def _join_panels(results: Sequence[RowFile], sink: RowWriter, height: int, cancel: Cancel) -> None:
    for top in range(0, height, COPY_ROWS):
        check_cancel(cancel)
        count = min(COPY_ROWS, height - top)
        sink.write(np.concatenate([panel.read(count) for panel in results], axis=1))


class RowFile:
    """Rows in a scratch file, read from the top once they are written."""

    def __init__(self, info: ImageInfo, folder: Path | None) -> None:
        """Create an empty file for rows of ``info``; the number of rows is open."""
        self.info = info
        self._file = ScratchFile(folder)
        self._written = self._read = 0

    def write(self, rows: np.ndarray) -> None:
        """Append rows of shape (rows, W, C)."""
        data = np.ascontiguousarray(rows)
        self._file.write(self._written * self.info.row_bytes, data.data.cast("B"))
        self._written += len(rows)

    def read(self, count: int) -> np.ndarray:
        """Return the next ``count`` rows, fewer only at the end."""
        count = min(count, self._written - self._read)
        rows = np.empty((count, self.info.width, self.info.channels), self.info.sample_type)
        if count:
            self._file.read(self._read * self.info.row_bytes, rows.data.cast("B"))
        self._read += count
        return rows

    def close(self) -> None:
        """Free the disk space; may be called more than once."""
        self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class _PanelSink:
    """Sink of a panel's results that passes on the columns the panel owns.

    From column ``left`` on, as many as ``target`` is wide.
    """

    def __init__(self, target: RowFile, left: int) -> None:
        self._target, self._left = target, left

    def write(self, rows: np.ndarray) -> None:
        self._target.write(rows[:, self._left : self._left + self._target.info.width])
