"""Drafts of layouts: cuts of a program, bands of each segment, places of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.core.units import MIB
from lowtide.memory.cache import MeasurementCache, cache_folder, package_digest
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.engine.cut_points import CutPoints
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, cut_segments
from lowtide.streaming.planner.band_count import BandCountSearch
from lowtide.streaming.planner.cost_model import CostModel, cost_model_for
from lowtide.streaming.planner.residency import (
    PageLifetime,
    PageOccupancy,
    page_lifetimes,
    select_resident,
)
from lowtide.streaming.rules.row_op import RowOp

# Number of segments beyond those that the program needs, and the effort up to which operators are
# recomputed rather than their results kept.
_RECOMPUTE_LIMIT = 128
_CUT = ((1, 0), (3, 0), (8, 0), (16, 0), (36, 0), (8, _RECOMPUTE_LIMIT), (36, _RECOMPUTE_LIMIT))
# Shares of the bytes of all pages that may stay in memory where the others do not fit.
RESIDENT_SHARES = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class StreamLayout:
    """A way to run a program: cuts, recompute effort, bands and page places.

    Attributes:
        cuts: Steps before which the program is cut into segments.
        recompute_limit: Effort up to which operators are recomputed rather than their results kept.
        segments: The segments.
        bands: Number of bands of each segment.
        placement: Where pages are kept.
        peak_bytes: Peak of the rows in memory (estimated, for a draft).
        calls: Number of operator calls.
        copied_bytes: Bytes concatenated for operators (of low bands mostly rows that two bands
            see), and bytes read and written by recomputed operators.
        spilled_bytes: Sum of the pages that are not held in memory.
        pages_bytes: Peak of all pages.
        spilled_peak_bytes: Peak of the pages that are not held in memory.
        disk_peak_bytes: Peak of these on disk, where a page is freed as a whole.
        cost_model: Cost model that turns all this into seconds.
        resident: Pages that stay in memory wherever the others are.
    """

    cuts: tuple[int, ...]
    recompute_limit: int
    segments: list[Segment]
    bands: tuple[int, ...]
    placement: Placement
    peak_bytes: int
    calls: int
    copied_bytes: int
    spilled_bytes: int
    pages_bytes: int
    spilled_peak_bytes: int
    disk_peak_bytes: int
    cost_model: CostModel
    resident: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the layout among those of its program."""
        return (
            self.cuts,
            self.recompute_limit,
            self.bands,
            self.placement,
            tuple(sorted(self.resident)),
        )

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        cost_model = self.cost_model
        speed, copying = (
            cost_model.spill_bytes_per_second.get(self.placement),
            self.copied_bytes / cost_model.copy_bytes_per_second,
        )
        moving = 2 * self.spilled_bytes / speed if speed else 0.0
        return self.calls * cost_model.call_seconds + moving + copying

    @property
    def cost(self) -> float:
        """Cost to compare layouts by: overhead seconds, and memory priced in seconds."""
        return self.overhead_seconds + self.peak_bytes / MIB * self.cost_model.seconds_per_mib


def layout_store(program: StreamProgram) -> MeasurementCache:
    """Return the on-disk store of facts about a program.

    They take seconds to minutes to compute.
    """
    return MeasurementCache(f"bands-{program.digest}-{package_digest()}", cache_folder())


class LayoutSearch:
    """Drafts layouts of one program; each segment is estimated once.

    Costs are those of the device of ``profile``, or of the one that the program was captured on.
    """

    def __init__(self, program: StreamProgram, profile: DeviceProfile | None = None) -> None:
        self._program, self._store = program, layout_store(program)
        self.cost_model = cost_model_for(program, profile)

    def drafts(
        self,
        caps: Sequence[int] = (),
        placements: Sequence[Placement] = ("memory", "disk"),
        resident_shares: Sequence[float] = (),
    ) -> Iterator[StreamLayout]:
        """Yield drafts that differ in cuts, band heights and page places.

        Args:
            caps: Bytes that bands stay within; by default the device's caps.
            placements: Places to try for pages.
            resident_shares: Shares of all pages' bytes: for each, also a draft that keeps in memory
                what fits in it and spills the other pages.
        """
        for way in self._segmentations:
            seen, parts = set[tuple[int, ...]](), way.resident_choices(resident_shares)
            for cap in caps or self.cost_model.caps:
                bands = tuple(glanced.fewest(cap) for glanced in way.band_searches)
                if bands in seen:
                    continue
                seen.add(bands)
                layout = way.layout(bands)
                # A layout without pages is the same for all places.
                yield from way.with_placements(
                    layout, placements if layout.pages_bytes else placements[:1], parts
                )
            self._store.save()

    @cached_property
    def _segmentations(self) -> list[_SegmentedProgram]:
        """Segmentations by different cuts, without duplicates."""
        cutter, found = CutPoints(self._program), dict[object, _SegmentedProgram]()
        for parts, again in _CUT:
            cuts = cutter.cuts(parts)
            segments = cut_segments(self._program, cuts, again)
            kept = cuts, *(tuple(part.pages) for part in segments)
            found.setdefault(
                kept,
                _SegmentedProgram(
                    self._program,
                    self.cost_model,
                    cuts,
                    again,
                    segments,
                    [
                        BandCountSearch(
                            self._program,
                            part,
                            f"{cuts} {again} {place}",
                            self._store,
                            only_segment=len(segments) == 1,
                        )
                        for place, part in enumerate(segments)
                    ],
                ),
            )
        return list(found.values())


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
class _SegmentedProgram:
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
