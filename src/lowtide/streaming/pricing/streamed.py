"""Candidates of the strategy `streamed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.core.heap import heap_setting
from lowtide.core.units import MIB
from lowtide.memory.costs import ModelCosts
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.plan import BandPlan, Plan
from lowtide.streaming.banded import WRITE_ROWS
from lowtide.streaming.bands.choose import DRAFTED_WITHIN
from lowtide.streaming.bands.drafts import Layout
from lowtide.streaming.bands.programs import Programs
from lowtide.streaming.bands.samples import READ_ROWS
from lowtide.streaming.pricing.facts import Picture, Shape
from lowtide.streaming.pricing.ledger import AS_FAST, calibrated, in_both_heaps, ledger, row
from lowtide.streaming.step import DTYPES

# A captured graph, and each of its operators; while it is captured it takes more.
_GRAPH_BYTES, _STEP_BYTES, _GRAPH_UPPER = 2 * MIB, 30 << 10, 2.5
# What the heap keeps between bands, as a share of what they take: blocks of two sizes take turns,
# and the C library's aligned ones do not fit the gaps that their like left.
_KEPT, _KEPT_UPPER = 1.1, 1.8


@dataclass(frozen=True)
class BandPricing:
    """Prices layouts of one network for one picture. Methods raise `ModelError` for a network
    that cannot be streamed."""

    costs: ModelCosts
    shape: Shape
    picture: Picture
    programs: Programs

    def candidates(self, *, small: bool = False) -> list[Plan]:
        """Plans by bands, a few between least memory and least time, with what they take roughly;
        ``small`` adds those for scarce memory."""
        height, width = self.picture.padded
        plans: list[Plan] = []
        for layout in self.programs.layouts(height, width, small=small):
            drafted = row(
                "bands and pages", "device", layout.bytes, layout.bytes * DRAFTED_WITHIN, "prior"
            )
            plans.append(self._plan(layout, [drafted]))
        return self._ample(in_both_heaps(plans, self.picture.streamed))

    def _ample(self, plans: list[Plan]) -> list[Plan]:
        """Leave out small bands where larger ones are as fast in an easy part of the budget:
        with small ones whatever grows with the image would show."""
        easy = [
            plan for plan in plans
            if plan.upper_bytes <= (self.picture.easy_bytes or 0)
            and plan.banded is not None and plan.banded.pages == "memory"
            and plan.heap != "gives back"
        ]  # fmt: skip
        if not easy:
            return plans
        largest = max(plan.upper_bytes for plan in easy)
        fastest = min(plan.seconds for plan in easy if plan.upper_bytes == largest)
        return [
            plan for plan in plans
            if plan.upper_bytes >= largest or plan.seconds * AS_FAST < fastest
        ]  # fmt: skip

    def told(self, plan: Plan) -> Plan:
        """``plan``, one of `candidates`, with what it takes exactly."""
        height, width = self.picture.padded
        assert plan.banded is not None
        banded = plan.banded
        key = banded.cuts, banded.again, banded.bands, banded.pages
        layout = self.programs.drafted(height, width, key)
        rows = self.programs.told(height, width, layout).rows
        both = in_both_heaps([self._plan(layout, rows)], self.picture.streamed)
        return next(one for one in both if one.heap == plan.heap)

    def _plan(self, layout: Layout, running: Sequence[LedgerRow]) -> Plan:
        costs, shape, info = self.costs, self.shape, self.picture.info
        height, width = self.picture.padded
        return Plan(
            strategy="streamed", accuracy="exact", device=costs.device,
            precision=costs.precision, channels_last=costs.channels_last,
            width=info.width, height=info.height, padded_width=width, padded_height=height,
            scale=shape.scale, align=shape.align, minimum=shape.minimum, square=shape.square,
            tile_width=width, tile_height=height, overlap=0, blend=0, batch=1, tiles=1,
            images_per_tile=self._images, run_pixels=height * width * self._images,
            seam_share=0.0, seconds=self._seconds(layout), recovery=("smaller plan",),
            ledger=calibrated(tuple(self._ledger(layout, running)), self.picture.streamed.usual),
            banded=BandPlan(
                cuts=layout.cuts, again=layout.again, bands=layout.bands, pages=layout.pages,
                pages_bytes=int(layout.pages_bytes * self._share),
                operators=self.programs.operators(height, width),
            ),
        )  # fmt: skip

    @property
    def _images(self) -> int:
        return self.shape.images(self.picture.info)

    @property
    def _share(self) -> float:
        """All images of a tile, and for a device elsewhere, the graph being that of fp32 on the
        CPU, its smaller numbers."""
        item, own = (
            DTYPES[one.precision].itemsize for one in (self.costs, self.programs.network)
        )
        return self._images * item / own

    def _seconds(self, layout: Layout) -> float:
        """Bands are of the size that was probed, so they are as fast as the last of the probes."""
        last = self.costs.points[-1]
        height, width = self.picture.padded
        network = height * width * last.seconds / last.pixels
        return (network + layout.overhead_seconds) * self._images

    def _ledger(self, layout: Layout, running: Sequence[LedgerRow]) -> Iterator[LedgerRow]:
        info, program = self.picture.info, self.programs.of(*self.picture.padded)
        graph = _GRAPH_BYTES + _STEP_BYTES * len(program.steps)
        rows = [
            row(one.name, one.place, one.value * self._share, one.upper * self._share, one.origin)
            for one in running if one.name != "context"  # told of every device's runs alike
        ]
        if self.costs.device == "cpu":
            bands = sum(one.value for one in rows)
            rows = [one for one in rows if one.name != "allocator"]
            if heap_setting() != "gives back":
                kept, most = _KEPT * bands, _KEPT_UPPER * bands
                rows.append(row("allocator", "device", kept, most, "prior"))
        rows.append(row("graph", "host", graph, graph * _GRAPH_UPPER, "prior"))
        # An image that more than one segment reads is held as it is in the file.
        (given,) = program.graph.inputs
        readers = sum(given in part.reads for part in layout.segments)
        band = -(-info.height // layout.bands[0]) + 2 * READ_ROWS
        held = info.row_bytes * (info.height if readers > 1 else min(info.height, band))
        made = info.row_bytes * self.shape.scale * 2 * WRITE_ROWS
        on_disk = layout.written_bytes * self._share if layout.pages == "disk" else 0
        if layout.pages == "host":
            locked = layout.pages_bytes * self._share
            rows.append(row("pages", "host", locked, locked, "known"))
        return ledger(
            self.costs, self.picture, rows, staged_bytes=4 * info.row_bytes * band,
            row_bytes=(held, made), scratch_bytes=int(on_disk),
        )  # fmt: skip
