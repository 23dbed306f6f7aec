"""Drafts of layouts: cuts of a program, bands of each segment, places of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.memory.plan_store import StoredTable, machine
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.engine.cut_points import CutPoints
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.planner.band_count import BandCountSearch
from lowtide.streaming.planner.cost_model import cost_model_for
from lowtide.streaming.planner.segmented_program import SegmentedProgram
from lowtide.streaming.planner.stream_layout import StreamLayout

# Number of segments beyond those that the program needs, and the effort up to which operators are
# recomputed rather than their results kept.
_RECOMPUTE_LIMIT = 128
_CUT = ((1, 0), (3, 0), (8, 0), (16, 0), (36, 0), (8, _RECOMPUTE_LIMIT), (36, _RECOMPUTE_LIMIT))
# Shares of the bytes of all pages that may stay in memory where the others do not fit.
RESIDENT_SHARES = (0.2, 0.4, 0.6, 0.8)


def layout_store(program: StreamProgram) -> StoredTable:
    """Return the stored facts about a program.

    They take seconds to minutes to compute.
    """
    return StoredTable("bands", program.digest, *machine())


class LayoutSearch:
    """Drafts layouts of one program; each segment is estimated once.

    Costs are those of the device of ``profile``, or of the one that the program was captured on.
    """

    def __init__(self, program: StreamProgram, profile: DeviceProfile | None = None) -> None:
        self._program, self._store = program, layout_store(program)
        self.cost_model = cost_model_for(program, profile)
        self._ways: list[SegmentedProgram] = []
        self._untried_ways = self._find_ways()
        # By segmentation, the seconds of its first drafts.
        self._seconds: dict[int, float] = {}

    def drafts(
        self,
        caps: Sequence[int] = (),
        placements: Sequence[Placement] = ("memory", "disk"),
        resident_shares: Sequence[float] = (),
        segmentations: int | None = None,
    ) -> Iterator[StreamLayout]:
        """Yield drafts that differ in cuts, band heights and page places.

        Args:
            caps: Bytes that bands stay within; by default the device's caps.
            placements: Places to try for pages.
            resident_shares: Shares of all pages' bytes: for each, also a draft that keeps in memory
                what fits in it and spills the other pages.
            segmentations: How many ways to cut the program are tried, by default all.
        """
        ways = self._first_ways(segmentations)
        for place, way in enumerate(ways):
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
            self._seconds.setdefault(place, sum(one.seconds for one in way.band_searches))

    @property
    def tried(self) -> int:
        """How many ways to cut the program have drafts."""
        return len(self._seconds)

    def has_more(self, segmentations: int) -> bool:
        """Return whether there are more ways to cut the program than these."""
        return len(self._first_ways(segmentations + 1)) > segmentations

    def seconds(self, segmentations: int) -> float:
        """Return about how long the first drafts of so many ways to cut take."""
        return sum(self._seconds.get(place, 0.0) for place in range(segmentations))

    def _first_ways(self, number: int | None) -> list[SegmentedProgram]:
        """Return the first segmentations by different cuts, without duplicates; or all."""
        while number is None or len(self._ways) < number:
            way = next(self._untried_ways, None)
            if way is None:
                break
            self._ways.append(way)
        return self._ways[:number]

    def _find_ways(self) -> Iterator[SegmentedProgram]:
        cutter, found = CutPoints(self._program), set[object]()
        for parts, again in _CUT:
            cuts = cutter.cuts(parts)
            segments = cut_segments(self._program, cuts, again)
            kept = cuts, *(tuple(part.pages) for part in segments)
            if kept in found:
                continue
            found.add(kept)
            searches = [
                BandCountSearch(
                    self._program,
                    part,
                    f"{cuts} {again} {place}",
                    self._store,
                    only_segment=len(segments) == 1,
                )
                for place, part in enumerate(segments)
            ]
            yield SegmentedProgram(self._program, self.cost_model, cuts, again, segments, searches)
