"""A program cut into segments, and its layouts by numbers of bands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.planner.band_count import BandCountSearch
from lowtide.streaming.planner.cost_model import CostModel
from lowtide.streaming.planner.residency import (
    PageLifetime,
    PageOccupancy,
    page_lifetimes,
    select_resident,
)
from lowtide.streaming.planner.stream_layout import StreamLayout
from lowtide.streaming.rules.row_op import RowOp


@dataclass(frozen=True)
class _ResidentPages:
    """Pages ``resident`` in memory and their occupancy, and the bytes of the spilled ones.

    Of the spilled pages: the sum, the peak in memory elsewhere, and the peak in files.
    """

    resident: frozenset[int]
    occupancy: PageOccupancy
    spilled_bytes: int
    spilled_peak_bytes: int
    disk_peak_bytes: int


@dataclass(frozen=True)
class SegmentedProgram:
    """A program cut into segments, before the number of bands is chosen."""

    program: StreamProgram
    cost_model: CostModel
    cuts: tuple[int, ...]
    recompute_limit: int
    segments: list[Segment]
    band_searches: list[BandCountSearch]

    @cached_property
    def _lifetimes(self) -> dict[int, PageLifetime]:
        return page_lifetimes(self.program, self.segments)

    @cached_property
    def _occupancy(self) -> PageOccupancy:
        return PageOccupancy(len(self.segments), self._lifetimes.values())

    def layout(self, bands: tuple[int, ...]) -> StreamLayout:
        """Return the draft with all pages in memory.

        Pages count from where they are written to their last read.
        """
        seen = [
            glanced.cost(number) for glanced, number in zip(self.band_searches, bands, strict=True)
        ]
        written = sum(life.size for life in self._lifetimes.values())
        return StreamLayout(
            self.cuts,
            self.recompute_limit,
            self.segments,
            bands,
            "memory",
            self._peak_bytes(bands, self._occupancy),
            calls=sum(calls for _, calls, _ in seen),
            copied_bytes=self._recomputed_bytes + sum(copied for _, _, copied in seen),
            spilled_bytes=written,
            pages_bytes=self._occupancy.peak_bytes,
            spilled_peak_bytes=0,
            disk_peak_bytes=0,
            cost_model=self.cost_model,
        )

    def resident_choices(self, resident_shares: Sequence[float]) -> list[_ResidentPages]:
        """Return choices of pages that stay in memory while the others are spilled.

        None at all, and those that fit in each of these shares of the bytes of all pages.
        """
        count, most = len(self.segments), self._occupancy.peak_bytes
        kept = [
            select_resident(self._lifetimes, count, int(share * most))
            for share in (0.0, *resident_shares)
        ]
        found = list[_ResidentPages]()
        for one in dict.fromkeys(kept):
            away = [life for index, life in self._lifetimes.items() if index not in one]
            elsewhere = PageOccupancy(count, away)
            found.append(
                _ResidentPages(
                    one,
                    PageOccupancy(count, (self._lifetimes[index] for index in one)),
                    sum(life.size for life in away),
                    elsewhere.peak_bytes,
                    elsewhere.disk_peak_bytes,
                )
            )
        return found

    def with_placements(
        self, layout: StreamLayout, placements: Sequence[Placement], parts: Sequence[_ResidentPages]
    ) -> Iterator[StreamLayout]:
        """Yield ``layout`` with its pages in each of the places ``placements``.

        The pages of ``layout`` are in memory. For each other place, yields one layout for each
        choice of resident pages in ``parts``.
        """
        for place in placements:
            if place == "memory":
                yield layout
                continue
            for part in parts:
                yield replace(
                    layout,
                    placement=place,
                    resident=part.resident,
                    peak_bytes=self._peak_bytes(layout.bands, part.occupancy),
                    spilled_bytes=part.spilled_bytes,
                    spilled_peak_bytes=part.spilled_peak_bytes,
                    disk_peak_bytes=part.disk_peak_bytes if place == "disk" else 0,
                )

    def _peak_bytes(self, bands: tuple[int, ...], occupancy: PageOccupancy) -> int:
        """Return the peak of bands and pages in memory."""
        return max(
            occupancy.bytes_at(place) + glanced.cost(number)[0]
            for place, (glanced, number) in enumerate(zip(self.band_searches, bands, strict=True))
        )

    @cached_property
    def _recomputed_bytes(self) -> int:
        """Bytes that steps read and write in segments after the first that runs them."""
        seen, moved, program = set[int](), 0, self.program
        for part in self.segments:
            for index in part.steps:
                step = program.steps[index]
                if index in seen and isinstance(step, RowOp) and not step.view:
                    moved += sum(map(program.bytes_of, (index, *step.inputs)))
            seen.update(part.steps)
        return moved
