"""Drafts of layouts: cuts of a program, bands of each segment, places of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.core.units import MIB
from lowtide.memory.cache import FactStore, cache_folder, package_digest
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, cut_segments
from lowtide.streaming.pages.placement import Placement
from lowtide.streaming.planner.band_count import BandCountSearch
from lowtide.streaming.planner.cost_model import CostModel, cost_model_for
from lowtide.streaming.planner.cut_points import CutPoints
from lowtide.streaming.planner.residency import (
    PageLifetime,
    PageOccupancy,
    page_lifetimes,
    select_resident,
)
from lowtide.streaming.rules.row_op import RowOp

# Number of segments beyond those that the program needs, and the effort up to which operators are
# recomputed rather than their results kept.
_AGAIN = 128
_CUT = ((1, 0), (3, 0), (8, 0), (16, 0), (36, 0), (8, _AGAIN), (36, _AGAIN))
# Shares of the bytes of all pages that may stay in memory where the others do not fit.
SHARES = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class StreamLayout:
    """A way to run a program: cuts, recompute effort, bands and page places.

    Attributes:
        cuts: Steps before which the program is cut into segments.
        again: Effort up to which operators are recomputed rather than their results kept.
        segments: The segments.
        bands: Number of bands of each segment.
        pages: Where pages are kept.
        bytes: Peak of the rows in memory (estimated, for a draft).
        calls: Number of operator calls.
        copied_bytes: Bytes concatenated for operators (of low bands mostly rows that two bands
            see), and bytes read and written by recomputed operators.
        written_bytes: Sum of the pages that are not held in memory.
        pages_bytes: Peak of all pages.
        away_bytes: Peak of the pages that are not held in memory.
        file_bytes: Peak of these on disk, where a page is freed as a whole.
        pace: Cost model that turns all this into seconds.
        held: Pages that stay in memory wherever the others are.
    """

    cuts: tuple[int, ...]
    again: int
    segments: list[Segment]
    bands: tuple[int, ...]
    pages: Placement
    bytes: int
    calls: int
    copied_bytes: int
    written_bytes: int
    pages_bytes: int
    away_bytes: int
    file_bytes: int
    pace: CostModel
    held: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the layout among those of its program."""
        return self.cuts, self.again, self.bands, self.pages, tuple(sorted(self.held))

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        pace = self.pace
        speed, again = pace.moved_bytes.get(self.pages), self.copied_bytes / pace.copied_bytes
        moving = 2 * self.written_bytes / speed if speed else 0.0
        return self.calls * pace.call_seconds + moving + again

    @property
    def cost(self) -> float:
        """Cost to compare layouts by: overhead seconds, and memory priced in seconds."""
        return self.overhead_seconds + self.bytes / MIB * self.pace.seconds_per_mib


def layout_store(program: StreamProgram) -> FactStore:
    """Return the on-disk store of facts about a program.

    They take seconds to minutes to compute.
    """
    return FactStore(f"bands-{program.digest}-{package_digest()}", cache_folder())


class LayoutSearch:
    """Drafts layouts of one program; each segment is estimated once."""

    def __init__(self, program: StreamProgram) -> None:
        self._program, self._store = program, layout_store(program)
        self.pace = cost_model_for(program)

    def drafts(
        self,
        caps: Sequence[int] = (),
        pages: Sequence[Placement] = ("memory", "disk"),
        shares: Sequence[float] = (),
    ) -> Iterator[StreamLayout]:
        """Yield drafts that differ in cuts, band heights and page places.

        Args:
            caps: Bytes that bands stay within; by default the device's caps.
            pages: Places to try for pages.
            shares: Shares of all pages' bytes: for each, also a draft that keeps in memory what
                fits in it and spills the other pages.
        """
        for way in self._ways:
            seen, parts = set[tuple[int, ...]](), way.parts(shares)
            for cap in caps or self.pace.caps:
                bands = tuple(glanced.fewest(cap) for glanced in way.glances)
                if bands in seen:
                    continue
                seen.add(bands)
                layout = way.layout(bands)
                # A layout without pages is the same for all places.
                yield from way.placed(layout, pages if layout.pages_bytes else pages[:1], parts)
            self._store.save()

    @cached_property
    def _ways(self) -> list[_SegmentedProgram]:
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
                    cuts,
                    again,
                    segments,
                    [
                        BandCountSearch(
                            self._program,
                            part,
                            f"{cuts} {again} {place}",
                            self._store,
                            alone=len(segments) == 1,
                        )
                        for place, part in enumerate(segments)
                    ],
                ),
            )
        return list(found.values())


@dataclass(frozen=True)
class _ResidentPages:
    """Pages ``held`` in memory and their occupancy, and the bytes of the spilled ones.

    Of the spilled pages: the sum, the peak in memory elsewhere, and the peak in files.
    """

    held: frozenset[int]
    occupied: PageOccupancy
    written_bytes: int
    away_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class _SegmentedProgram:
    """A program cut into segments, before the number of bands is chosen."""

    program: StreamProgram
    cuts: tuple[int, ...]
    again: int
    segments: list[Segment]
    glances: list[BandCountSearch]

    @cached_property
    def _lives(self) -> dict[int, PageLifetime]:
        return page_lifetimes(self.program, self.segments)

    @cached_property
    def _occupied(self) -> PageOccupancy:
        return PageOccupancy(len(self.segments), self._lives.values())

    def layout(self, bands: tuple[int, ...]) -> StreamLayout:
        """Return the draft with all pages in memory.

        Pages count from where they are written to their last read.
        """
        seen = [glanced.at(number) for glanced, number in zip(self.glances, bands, strict=True)]
        written = sum(life.size for life in self._lives.values())
        return StreamLayout(
            self.cuts,
            self.again,
            self.segments,
            bands,
            "memory",
            self._most(bands, self._occupied),
            calls=sum(calls for _, calls, _ in seen),
            copied_bytes=self._again_bytes + sum(copied for _, _, copied in seen),
            written_bytes=written,
            pages_bytes=self._occupied.most,
            away_bytes=0,
            file_bytes=0,
            pace=cost_model_for(self.program),
        )

    def parts(self, shares: Sequence[float]) -> list[_ResidentPages]:
        """Return choices of pages that stay in memory while the others are spilled.

        None at all, and those that fit in each of these shares of the bytes of all pages.
        """
        count, most = len(self.segments), self._occupied.most
        kept = [select_resident(self._lives, count, int(share * most)) for share in (0.0, *shares)]
        found = list[_ResidentPages]()
        for one in dict.fromkeys(kept):
            away = [life for index, life in self._lives.items() if index not in one]
            elsewhere = PageOccupancy(count, away)
            found.append(
                _ResidentPages(
                    one,
                    PageOccupancy(count, (self._lives[index] for index in one)),
                    sum(life.size for life in away),
                    elsewhere.most,
                    elsewhere.most_in_files,
                )
            )
        return found

    def placed(
        self, layout: StreamLayout, pages: Sequence[Placement], parts: Sequence[_ResidentPages]
    ) -> Iterator[StreamLayout]:
        """Yield ``layout`` with its pages in each of the places ``pages``.

        The pages of ``layout`` are in memory. For each other place, yields one layout for each
        choice of resident pages in ``parts``.
        """
        for place in pages:
            if place == "memory":
                yield layout
                continue
            for part in parts:
                yield replace(
                    layout,
                    pages=place,
                    held=part.held,
                    bytes=self._most(layout.bands, part.occupied),
                    written_bytes=part.written_bytes,
                    away_bytes=part.away_bytes,
                    file_bytes=part.file_bytes if place == "disk" else 0,
                )

    def _most(self, bands: tuple[int, ...], pages: PageOccupancy) -> int:
        """Return the peak of bands and pages in memory."""
        return max(
            pages.at(place) + glanced.at(number)[0]
            for place, (glanced, number) in enumerate(zip(self.glances, bands, strict=True))
        )

    @cached_property
    def _again_bytes(self) -> int:
        """Bytes that steps read and write in segments after the first that runs them."""
        seen, moved, program = set[int](), 0, self.program
        for part in self.segments:
            for index in part.steps:
                step = program.steps[index]
                if index in seen and isinstance(step, RowOp) and not step.view:
                    moved += sum(map(program.bytes_of, (index, *step.inputs)))
            seen.update(part.steps)
        return moved
