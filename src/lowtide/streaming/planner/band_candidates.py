"""Candidate plans of the strategy `streamed`: bands of rows, optionally in panels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.core.heap import heap_mode
from lowtide.memory.costs import ModelCosts
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.plan import BandPlan, Plan
from lowtide.streaming.engine.run_rows import WRITE_ROWS
from lowtide.streaming.engine.source_page import READ_ROWS
from lowtide.streaming.planner.layout_search import StreamLayout
from lowtide.streaming.planner.ledger_rows import (
    AS_FAST,
    calibrate_rows,
    ledger_row,
    run_ledger,
    with_heap_modes,
)
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry
from lowtide.streaming.planner.program_cache import ProgramCache
from lowtide.streaming.planner.select import DRAFTED_WITHIN
from lowtide.streaming.tiles.grid import round_up, smallest_equal_tile, split_axis
from lowtide.streaming.tiles.panels import MOVED_ROWS
from lowtide.streaming.tiles.tile_step import DTYPES

# Bytes of a captured graph, and for each of its nodes. Most is not the graph itself but heap
# fragmentation that its capture causes in the first run of a size. Seen in nine model families of
# 33 to 3,878 nodes.
_GRAPH_BYTES, _NODE_BYTES = 600 << 10, 17 << 10
# Overhead of a run in addition to all named rows: thread stacks and Python's own objects. Seen with
# images so small that little else is allocated.
_BESIDE_BYTES = 1536 << 10
_GRAPH_UPPER, _GRAPH_MARGIN = 2.0, 10 << 20
# What the heap keeps between bands, as a share of their blocks below the return threshold: blocks
# of two sizes alternate, and the C library's aligned blocks do not fit the gaps that others left.
_KEPT, _KEPT_UPPER = 0.4, 1.0
# Largest panel width in columns, the fewest panels worth splitting into, and the largest share of
# columns that may run twice where panels overlap.
_PANEL, _FEW_PANELS, _TWICE = 2048, 3, 0.05
# Bands of the bundled models and of DRCT took 1.16 to 1.22 times as long as the same pixels in one
# piece: rows are recomputed, and adapted models do some work on whole feature maps only. Other
# models took less than that.
_PACE = 1.15
# Bytes per second that a scratch file reads or writes.
_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class BandCandidates:
    """Plans and prices band layouts of one network for one image.

    ``panel`` is how many columns run at a time, by default all of them. Methods raise `ModelError`
    for a network that cannot be streamed.
    """

    costs: ModelCosts
    shape: ModelGeometry
    picture: ImageTask
    programs: ProgramCache
    panel: int | None = None

    def candidates(self, *, small: bool = False) -> list[Plan]:
        """Return streamed plans between least memory and least time, roughly priced.

        ``small`` adds plans for scarce memory. Wide images may run in panels too.
        """
        panel = None if self.panel else self._narrower()
        plans = replace(self, panel=panel).candidates(small=small) if panel else []
        return self._of_one_width(small=small) + plans

    def _narrower(self) -> int | None:
        """Return the panel width worth pricing, or None where panels do not pay."""
        width = self.picture.padded[1]
        most = round_up(_PANEL, self.shape.align)
        if self.costs.reach is None or width < _FEW_PANELS * most or self.shape.square:
            return None
        if self._overlap > _TWICE * most:
            return None
        return smallest_equal_tile(width, most, self._overlap, self.shape.align, self.shape.minimum)

    @property
    def _overlap(self) -> int:
        """Columns shared by two panels: both halos, or at least the edges of an alpha."""
        return 2 * max(self.costs.reach or 0, 1)

    @property
    def _size(self) -> tuple[int, int]:
        """(height, width) of the network's input."""
        height, width = self.picture.padded
        return height, self.panel or width

    @property
    def _panels(self) -> int:
        align, (_, width) = self.shape.align, self.picture.padded
        return len(split_axis(width, self._size[1], self._overlap, align=align).starts)

    def _of_one_width(self, *, small: bool) -> list[Plan]:
        height, width = self._size
        plans: list[Plan] = []
        for layout in self.programs.layouts(height, width, small=small):
            drafted = ledger_row(
                "bands and pages", "device", layout.bytes, layout.bytes * DRAFTED_WITHIN, "prior"
            )
            plans.append(self._plan(layout, [drafted]))
        plans = with_heap_modes(plans, self.picture.streamed)
        # Where memory is scarce, a draft that seems to fit may not: keep the smallest plans as
        # well.
        return plans if small else self._ample(plans)

    def _ample(self, plans: list[Plan]) -> list[Plan]:
        """Drop small bands where larger ones are as fast and fit the budget easily.

        With small bands, anything that grows with the image would show in the peak.
        """
        easy = [
            plan
            for plan in plans
            if plan.upper_bytes <= (self.picture.easy_bytes or 0)
            and plan.banded is not None
            and plan.banded.pages == "memory"
            and plan.heap != "gives back"
        ]
        if not easy:
            return plans
        largest = max(plan.upper_bytes for plan in easy)
        fastest = min(plan.seconds for plan in easy if plan.upper_bytes == largest)
        return [
            plan
            for plan in plans
            if plan.upper_bytes >= largest or plan.seconds * AS_FAST < fastest
        ]

    def told(self, plan: Plan) -> Plan:
        """Return ``plan``, one of `candidates`, with the exact bytes of its dry run."""
        if plan.tile_width != self._size[1]:
            return replace(self, panel=plan.tile_width).told(plan)
        height, width = self._size
        assert plan.banded is not None
        layout = self.programs.drafted(height, width, plan.banded.key)
        told = self.programs.told(height, width, layout)
        both = with_heap_modes([self._plan(layout, told.rows, told.piece)], self.picture.streamed)
        return next(one for one in both if one.heap == plan.heap)

    def _plan(self, layout: StreamLayout, running: Sequence[LedgerRow], piece: int = 0) -> Plan:
        costs, shape, info = self.costs, self.shape, self.picture.info
        height, width = self._size
        return Plan(
            strategy="streamed",
            accuracy="exact",
            device=costs.device,
            precision=costs.precision,
            channels_last=costs.channels_last,
            width=info.width,
            height=info.height,
            padded_width=self.picture.padded[1],
            padded_height=height,
            scale=shape.scale,
            align=shape.align,
            minimum=shape.minimum,
            square=shape.square,
            tile_width=width,
            tile_height=height,
            overlap=self._overlap if self.panel else 0,
            blend=0,
            batch=1,
            tiles=self._panels,
            images_per_tile=self._images,
            run_pixels=height * width * self._images,
            seam_share=0.0,
            seconds=self._seconds(layout),
            recovery=("smaller plan",),
            ledger=calibrate_rows(
                tuple(self._ledger(layout, running)), self.picture.streamed.usual
            ),
            banded=BandPlan(
                cuts=layout.cuts,
                again=layout.again,
                bands=layout.bands,
                pages=layout.pages,
                held=tuple(sorted(layout.held)),
                pages_bytes=int(layout.pages_bytes * self._share),
                away_bytes=int(layout.away_bytes * self._share),
                piece_bytes=int(piece * self._share) // self._images,
                operators=self.programs.operators(height, width),
            ),
        )

    def _moving(self, running: Sequence[LedgerRow]) -> tuple[int, int]:
        """Return the (usual, largest) bytes needed before and after the panels run.

        Only what exceeds the bytes of the bands, which run between: files are read and written one
        after the other, and whole rows pass through.
        """
        usual, most = max(self.picture.codecs, key=lambda codec: codec[1], default=(0, 0))
        rows = self.picture.info.row_bytes * (1 + self.shape.scale) * 2 * MOVED_ROWS
        # GPU memory freed by bands is of no use for files.
        bands = [one for one in running if one.place == "device" and self.costs.device == "cpu"]
        value, upper = sum(one.value for one in bands), sum(one.upper for one in bands)
        return max(0, usual + rows - value), max(0, most + rows - upper)

    @property
    def _images(self) -> int:
        return self.shape.images(self.picture.info)

    @property
    def _share(self) -> float:
        """Factor from the captured graph to the run: images per tile, and element size.

        The graph is that of fp32 on the CPU; another device may use smaller dtypes.
        """
        item, own = (DTYPES[one.precision].itemsize for one in (self.costs, self.programs.network))
        return self._images * item / own

    @property
    def least_seconds(self) -> float:
        """Seconds that bands hardly beat: every pixel once at the best measured speed.

        Includes the usual slowdown `_PACE`.
        """
        pixels = math.prod(self.picture.padded) * self._images
        return pixels * self.costs.least_seconds_per_pixel * _PACE

    def _seconds(self, layout: StreamLayout) -> float:
        """Return the predicted seconds of a layout.

        A pixel of a band takes as long as one in a run on as many pixels as the band has, within
        the probed sizes, since bands of a few rows stay in the caches; times the usual slowdown
        `_PACE`.
        """
        total, (least, *_, most) = math.prod(self._size), (one.pixels for one in self.costs.points)
        sizes = [min(max(total // number, least), most) for number in layout.bands]
        network = sum(total * self.costs.seconds(size) / size for size in sizes) / len(sizes)
        speed = self.costs.speed
        panel = (_PACE * network + speed * layout.overhead_seconds) * self._images
        return panel * self._panels + speed * 2 * self._joined_bytes / _FILE_BYTES

    @property
    def _joined_bytes(self) -> int:
        """Bytes of the inputs and results of all panels, all on disk at the end."""
        if not self.panel:
            return 0
        info = self.picture.info
        given = info.row_bytes * self.panel * self._panels // info.width
        return (given + info.row_bytes * self.shape.scale**2) * info.height

    def _ledger(self, layout: StreamLayout, running: Sequence[LedgerRow]) -> Iterator[LedgerRow]:
        info, program = self.picture.info, self.programs.of(*self._size)
        row_bytes = info.row_bytes * self._size[1] // self.picture.padded[1]
        graph = _BESIDE_BYTES + _GRAPH_BYTES + _NODE_BYTES * len(program.graph.nodes)
        rows = [
            ledger_row(
                one.name, one.place, one.value * self._share, one.upper * self._share, one.origin
            )
            for one in running
            if one.name != "context"  # counted the same for runs on every device
        ]
        if self.costs.device == "cpu":
            reusable = [one.value for one in rows if one.name == "allocator"]
            rows = [one for one in rows if one.name != "allocator"]
            if heap_mode() != "gives back":
                bands = sum(one.value for one in rows)
                kept, most = _KEPT * sum(reusable or [bands]), _KEPT_UPPER * bands
                rows.append(ledger_row("allocator", "device", kept, most, "prior"))
        most = graph * _GRAPH_UPPER + _GRAPH_MARGIN
        rows.append(ledger_row("graph", "host", graph, most, "prior"))
        # An image that more than one segment reads is held whole, in the file's dtype.
        (given,) = program.graph.inputs
        readers = sum(given in part.reads for part in layout.segments)
        band = -(-info.height // layout.bands[0]) + 2 * READ_ROWS
        held = row_bytes * (info.height if readers > 1 else min(info.height, band))
        made = row_bytes * self.shape.scale * 2 * WRITE_ROWS
        picture = self.picture
        if self.panel:
            picture = replace(picture, codecs=(self._moving(rows),))
        on_disk = layout.file_bytes * self._share
        if layout.pages == "host":
            locked = layout.away_bytes * self._share
            rows.append(ledger_row("pages", "host", locked, locked, "known"))
        return run_ledger(
            self.costs,
            picture,
            rows,
            staged_bytes=4 * row_bytes * band,
            row_bytes=(held, made),
            scratch_bytes=int(on_disk) + self._joined_bytes,
        )
