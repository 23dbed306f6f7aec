"""Candidate plans of the strategy `streamed`: bands of rows, optionally in panels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lowtide.core.heap import heap_mode
from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import LedgerRow, Plan, StreamedStrategy
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.source_run import WRITE_ROWS
from lowtide.streaming.planner.layout_search import StreamLayout
from lowtide.streaming.planner.ledger_rows import (
    EQUALLY_FAST,
    calibrate_margin,
    ledger_row,
    run_ledger,
    with_heap_modes,
)
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry, plan_fields
from lowtide.streaming.planner.program_cache import StreamPlannerCache
from lowtide.streaming.planner.stream_planner import CandidateBytes
from lowtide.streaming.row_window import READ_ROWS
from lowtide.streaming.tiles.grid import round_up, smallest_equal_tile, split_axis
from lowtide.streaming.tiles.run_rows import COPY_ROWS
from lowtide.streaming.tiles.tile_step import DTYPES

# Bytes of a captured graph, and for each of its nodes. Most is not the graph itself but heap
# fragmentation that its capture causes in the first run of a size. Seen in nine model families of
# 33 to 3,878 nodes.
_GRAPH_BYTES, _NODE_BYTES = 600 << 10, 17 << 10
# Overhead of a run in addition to all named rows: thread stacks and Python's own objects. Seen with
# images so small that little else is allocated.
_RUN_OVERHEAD_BYTES = 1536 << 10
_GRAPH_UPPER, _GRAPH_MARGIN = 2.0, 10 << 20
# What the heap keeps between bands, as a share of their blocks below the return threshold: blocks
# of two sizes alternate, and the C library's aligned blocks do not fit the gaps that others left.
_HEAP_KEPT_SHARE, _HEAP_KEPT_UPPER = 0.4, 1.0
# Largest panel width in columns, the fewest panels worth splitting into, and the largest share of
# columns that may run twice where panels overlap.
_MAX_PANEL_WIDTH, _MIN_PANELS, _MAX_OVERLAP_SHARE = 2048, 3, 0.05
# Bands of the bundled models and of DRCT took 1.16 to 1.22 times as long as the same pixels in one
# piece: rows are recomputed, and adapted models do some work on whole feature maps only. Other
# models took less than that.
_BAND_SLOWDOWN = 1.15
# Bytes per second that a scratch file reads or writes.
_FILE_BYTES_PER_SECOND = 1 << 30


@dataclass(frozen=True)
class BandPlanner:
    """Plans and prices band layouts of one network for one image.

    ``panel_width`` is how many columns run at a time, by default all of them. Each instance learns
    from its own dry runs only. Methods raise `ModelError` for a network that cannot be streamed.
    """

    costs: ModelCosts
    geometry: ModelGeometry
    image_task: ImageTask
    programs: StreamPlannerCache
    panel_width: int | None = None
    _bytes: dict[tuple[int, int], CandidateBytes] = field(default_factory=dict)

    def candidates(self) -> list[Plan]:
        """Return streamed plans between least memory and least time, roughly priced.

        Wide images may run in panels too.
        """
        panel = None if self.panel_width else self._best_panel_width()
        widths = [self, *([replace(self, panel_width=panel)] if panel else [])]
        return [plan for one in widths for plan in one._candidates_of_width()]

    def _best_panel_width(self) -> int | None:
        """Return the panel width worth pricing, or None where panels do not pay."""
        width = self.image_task.padded_size[1]
        most = round_up(_MAX_PANEL_WIDTH, self.geometry.align)
        if self.costs.receptive_field is None or width < _MIN_PANELS * most or self.geometry.square:
            return None
        if self._overlap > _MAX_OVERLAP_SHARE * most:
            return None
        return smallest_equal_tile(
            width, most, self._overlap, self.geometry.align, self.geometry.minimum
        )

    @property
    def _overlap(self) -> int:
        """Columns shared by two panels: both halos, or at least the context of an adapter."""
        return 2 * max(self.costs.receptive_field or 0, 1)

    @property
    def _size(self) -> tuple[int, int]:
        """(height, width) of the network's input."""
        height, width = self.image_task.padded_size
        return height, self.panel_width or width

    @property
    def _panels(self) -> int:
        align, (_, width) = self.geometry.align, self.image_task.padded_size
        return len(split_axis(width, self._size[1], self._overlap, align=align).starts)

    def _bytes_of_width(self) -> CandidateBytes:
        if self._size not in self._bytes:
            self._bytes[self._size] = CandidateBytes(self.programs.planner(*self._size))
        return self._bytes[self._size]

    def _candidates_of_width(self) -> list[Plan]:
        layouts = self._bytes_of_width().planner.candidates
        return self._drop_small_bands([plan for one in layouts for plan in self._plans(one)])

    def _drop_small_bands(self, plans: list[Plan]) -> list[Plan]:
        """Drop small bands where larger ones are as fast and fit the budget easily.

        With small bands, anything that grows with the image would show in the peak.
        """
        easy = [
            plan
            for plan in plans
            if plan.upper_bytes <= (self.image_task.ample_bytes or 0)
            and isinstance(plan.strategy, StreamedStrategy)
            and plan.strategy.pages == "memory"
            and plan.heap != "trim"
        ]
        if not easy:
            return plans
        largest = max(plan.upper_bytes for plan in easy)
        fastest = min(plan.seconds for plan in easy if plan.upper_bytes == largest)
        return [
            plan
            for plan in plans
            if plan.upper_bytes >= largest or plan.seconds * EQUALLY_FAST < fastest
        ]

    def untried(self) -> Iterator[Plan]:
        """Yield plans without a dry run, smallest first, with the least bytes they may take."""
        for (_, width), known in self._bytes.items():
            for layout, least in known.untried():
                yield from self._of_width(width)._plans(layout, least)

    def is_exact(self, plan: Plan) -> bool:
        """Return whether the bytes of ``plan`` are no draft: not streamed, or after a dry run."""
        if not isinstance(plan.strategy, StreamedStrategy):
            return True
        known, layout = self._find(plan.strategy)
        return known.known_dry_run(layout) is not None

    def dry_run(self, plan: Plan) -> None:
        """Make the dry run of one of `candidates`.

        `candidates` have its exact bytes from then on, and those like it are corrected.
        """
        assert isinstance(plan.strategy, StreamedStrategy)
        known, layout = self._find(plan.strategy)
        known.dry_run(layout)

    def _of_width(self, width: int) -> BandPlanner:
        return self if width == self._size[1] else replace(self, panel_width=width)

    def _find(self, bands: StreamedStrategy) -> tuple[CandidateBytes, StreamLayout]:
        known = self._of_width(bands.panel_width)._bytes_of_width()
        return known, known.planner.layout(bands.layout_key)

    def _plans(self, layout: StreamLayout, least: int | None = None) -> list[Plan]:
        """Return plans of a layout by heap mode; ``least`` instead of the bytes to expect."""
        return with_heap_modes([self._plan(layout, least)], self.image_task.streamed_bounds)

    def _plan(self, layout: StreamLayout, least: int | None) -> Plan:
        bytes_of = self._bytes_of_width()
        program = bytes_of.planner.program
        return Plan(
            **plan_fields(self.costs, self.geometry, self.image_task),
            accuracy="exact",
            seconds=self._seconds(layout),
            ledger=calibrate_margin(
                tuple(self._ledger(program, layout, bytes_of.rows(layout, least))),
                self.image_task.streamed_bounds.current_heap,
                self.costs.device,
            ),
            strategy=StreamedStrategy(
                cuts=layout.cuts,
                bands=layout.bands,
                pages=layout.placement,
                resident=tuple(sorted(layout.resident)),
                intermediate_peak_bytes=int(layout.pages_bytes * self._byte_factor),
                spilled_peak_bytes=int(layout.spilled_peak_bytes * self._byte_factor),
                graph_digest=program.operators_digest,
                panels=self._panels,
                panel_width=self._size[1],
                panel_overlap=self._overlap if self.panel_width else 0,
            ),
        )

    def _between_panels(self, network_rows: Sequence[LedgerRow]) -> ImageTask:
        """Return the task with the bytes that its files take in addition while panels run.

        Files are read before and written after them, one after the other, and whole rows pass
        through: only what exceeds the bytes of the bands counts. A video's decoder and encoder
        stay.
        """
        task, moved = self.image_task, self._moved_row_bytes
        if task.codecs_stay:
            return replace(task, codec_bytes=(*task.codec_bytes, (moved, moved)))
        usual, most = max(task.codec_bytes, key=lambda codec: codec[1], default=(0, 0))
        # GPU memory freed by bands is of no use for files.
        bands = [
            one for one in network_rows if one.place == "device" and self.costs.device == "cpu"
        ]
        value, upper = sum(one.value for one in bands), sum(one.upper for one in bands)
        codec = max(0, usual + moved - value), max(0, most + moved - upper)
        last = tuple(taken + moved for taken in task.finishing_bytes if taken)
        return replace(task, codec_bytes=(codec,), finishing_bytes=last or (0, 0))

    @property
    def _moved_row_bytes(self) -> int:
        """Bytes of the rows that are copied at once between files and panels."""
        return self.image_task.row_bytes * (1 + self.geometry.scale) * 2 * COPY_ROWS

    @property
    def _byte_factor(self) -> float:
        """Factor from the captured graph to the run: images per tile, and element size.

        The graph is that of fp32 on the CPU; another device may use smaller dtypes.
        """
        item, own = (DTYPES[one.precision].itemsize for one in (self.costs, self.programs.network))
        return self.image_task.inputs * item / own

    @property
    def least_seconds(self) -> float:
        """Seconds that bands hardly beat: every pixel once at the best measured speed.

        Includes the usual slowdown `_BAND_SLOWDOWN`.
        """
        pixels = math.prod(self.image_task.padded_size) * self.image_task.inputs
        return pixels * self.costs.least_seconds_per_pixel * _BAND_SLOWDOWN

    def _seconds(self, layout: StreamLayout) -> float:
        """Return the predicted seconds of a layout.

        A pixel of a band takes as long as one in a run on as many pixels as the band has, within
        the probed sizes, since bands of a few rows stay in the caches; times the usual slowdown
        `_BAND_SLOWDOWN`.
        """
        total, (least, *_, most) = math.prod(self._size), self.costs.timed_pixels
        sizes = [min(max(total // number, least), most) for number in layout.bands]
        network = sum(total * self.costs.seconds(size) / size for size in sizes) / len(sizes)
        speed = self.costs.time_scale
        panel = (
            _BAND_SLOWDOWN * network + speed * layout.overhead_seconds
        ) * self.image_task.inputs
        return panel * self._panels + speed * 2 * self._panel_file_bytes / _FILE_BYTES_PER_SECOND

    @property
    def _panel_file_bytes(self) -> int:
        """Bytes of the inputs and results of all panels, all on disk at the end."""
        if not self.panel_width:
            return 0
        (height, width, _), row_bytes = self.image_task.shape, self.image_task.row_bytes
        given = row_bytes * self.panel_width * self._panels // width
        return (given + row_bytes * self.geometry.scale**2) * height

    def _ledger(
        self, program: StreamProgram, layout: StreamLayout, network_rows: Sequence[LedgerRow]
    ) -> Iterator[LedgerRow]:
        height = self.image_task.shape[0]
        row_bytes = self.image_task.row_bytes * self._size[1] // self.image_task.padded_size[1]
        graph = _RUN_OVERHEAD_BYTES + _GRAPH_BYTES + _NODE_BYTES * len(program.graph.nodes)
        rows = [
            ledger_row(
                one.name,
                one.place,
                one.value * self._byte_factor,
                one.upper * self._byte_factor,
                one.origin,
            )
            for one in network_rows
            if one.name != "context"  # counted the same for runs on every device
        ]
        if self.costs.device == "cpu":
            reusable = [one.value for one in rows if one.name == "allocator"]
            rows = [one for one in rows if one.name != "allocator"]
            if heap_mode() != "trim":
                bands = sum(one.value for one in rows)
                kept, most = _HEAP_KEPT_SHARE * sum(reusable or [bands]), _HEAP_KEPT_UPPER * bands
                rows.append(ledger_row("allocator", "device", kept, most, "prior"))
        most = graph * _GRAPH_UPPER + _GRAPH_MARGIN
        rows.append(ledger_row("graph", "host", graph, most, "prior"))
        # A source that more than one segment reads is held whole, in its own dtype.
        (given,) = program.graph.inputs
        readers = sum(given in part.reads for part in layout.segments)
        band = -(-height // layout.bands[0]) + 2 * READ_ROWS
        held = row_bytes * (height if readers > 1 else min(height, band))
        made = row_bytes * self.geometry.scale * 2 * WRITE_ROWS
        image_task = self._between_panels(rows) if self.panel_width else self.image_task
        on_disk = layout.disk_peak_bytes * self._byte_factor
        if layout.placement == "host":
            locked = layout.spilled_peak_bytes * self._byte_factor
            rows.append(ledger_row("pages", "host", locked, locked, "known"))
        return run_ledger(
            self.costs,
            image_task,
            rows,
            staged_bytes=4 * row_bytes * band,
            row_bytes=(held, made),
            scratch_bytes=int(on_disk) + self._panel_file_bytes,
        )
