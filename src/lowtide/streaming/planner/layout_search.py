"""Layouts, which are cuts of a program, bands of each segment and places of pages: their drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.core.units import GIB, MIB
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.profiles import DeviceProfile
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import CutFinder, ProgramSegment, cut_segments
from lowtide.streaming.planner.layout_cost import (
    PageOccupancy,
    SegmentCostEstimator,
    page_lifetimes,
    select_resident_pages,
)
from lowtide.streaming.rules.rule import RowOp


@dataclass(frozen=True)
class StreamCostModel:
    """Overhead of streamed runs beyond the operators' own time, on one device.

    Only for comparing layouts.

    Attributes:
        call_seconds: Overhead between two operator calls.
        copy_bytes_per_second: Bytes per second that light operators and copies of rows read and
            write.
        spill_bytes_per_second: Bytes per second of a disk or a GPU's bus, by place of the pages.
        seconds_per_mib: Seconds that one more MiB must save.
    """

    call_seconds: float
    copy_bytes_per_second: int
    spill_bytes_per_second: Mapping[str, int]
    seconds_per_mib: float


CPU = StreamCostModel(7e-5, 5 * GIB, {"disk": GIB, "host": 10 * GIB}, 2e-4)
# A GPU idles until the next operator is launched, and higher bands need fewer launches; its memory
# is hardly used by anything else.
GPU = StreamCostModel(1.2e-4, 200 * GIB, {"disk": GIB, "host": 12 * GIB}, 2e-6)
# Share of a GPU's bandwidth that copies of rows reach, and of a bus that copies to the host reach.
_BANDWIDTH_SHARE, _BUS_SHARE = 0.7, 0.8


def cost_model_for(program: StreamProgram, profile: DeviceProfile | None = None) -> StreamCostModel:
    """Return the cost model of the device that a program was captured on, or of a GPU's profile."""
    if profile is None:
        return CPU if program.graph.on_cpu else GPU
    bus = profile.pcie_bytes_per_s or GPU.spill_bytes_per_second["host"]
    return replace(
        GPU,
        copy_bytes_per_second=min(
            GPU.copy_bytes_per_second, int(profile.bandwidth_bytes_per_s * _BANDWIDTH_SHARE)
        ),
        spill_bytes_per_second={**GPU.spill_bytes_per_second, "host": int(bus * _BUS_SHARE)},
    )


@dataclass(frozen=True)
class StreamLayout:
    """A way to run a program: cuts, bands and page places.

    Attributes:
        cuts: Steps before which the program is cut into segments.
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
    segments: list[ProgramSegment]
    bands: tuple[int, ...]
    placement: Placement
    peak_bytes: int
    calls: int
    copied_bytes: int
    spilled_bytes: int
    pages_bytes: int
    spilled_peak_bytes: int
    disk_peak_bytes: int
    cost_model: StreamCostModel
    resident: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the layout among those of its program."""
        return self.cuts, self.bands, self.placement, tuple(sorted(self.resident))

    @property
    def overhead_seconds(self) -> float:
        """Estimated seconds in addition to the operators' own time."""
        model = self.cost_model
        speed = model.spill_bytes_per_second.get(self.placement)
        moving = 2 * self.spilled_bytes / speed if speed else 0.0
        copying = self.copied_bytes / model.copy_bytes_per_second
        return self.calls * model.call_seconds + moving + copying

    @property
    def cost(self) -> float:
        """Cost to compare layouts by: overhead seconds, and memory priced in seconds."""
        return self.overhead_seconds + self.peak_bytes / MIB * self.cost_model.seconds_per_mib


# Numbers of segments beyond those that the program needs. On 14 programs of ten model families, 3
# and 16 as well saved one percent of the time on a CPU, two on a GPU, in the mean of 24 limits.
_CUTS = 1, 8, 36
# Bytes that the bands of a segment should stay within: 1 MiB to 16 GiB. Drafts are cheap, and those
# that fill what is left take the least time.
CAPS = tuple(int(MIB * 2 ** (step / 4)) for step in range(57))
# Shares of the bytes of all pages that may stay in memory where the others do not fit.
RESIDENT_SHARES = (0.2, 0.6)


def layout_store(program: StreamProgram) -> JsonCacheTable:
    """Return the stored facts about a program.

    They take seconds to minutes to compute.
    """
    return JsonCacheTable("bands", program.digest, *machine_facts())


def draft_layouts(
    program: StreamProgram,
    caps: Sequence[int] = CAPS,
    placements: Sequence[Placement] = ("memory", "disk"),
    resident_shares: Sequence[float] = (),
    profile: DeviceProfile | None = None,
) -> Iterator[StreamLayout]:
    """Yield drafts that differ in cuts, band heights and page places.

    Costs are those of the device of ``profile``, or of the one that the program was captured on.

    Args:
        program: The program.
        caps: Bytes that bands stay within.
        placements: Places to try for pages.
        resident_shares: Shares of all pages' bytes: for each, also a draft that keeps in memory
            what fits in it and spills the other pages.
        profile: Device to plan for, if it is not here.
    """
    cutter, store = CutFinder(program), layout_store(program)
    cost_model = cost_model_for(program, profile)
    for cuts in dict.fromkeys(map(cutter.cuts, _CUTS)):
        cut_program = _CutProgram(program, cost_model, cuts, store)
        yield from cut_program.drafts(caps, placements, resident_shares)
        store.save()


@dataclass(frozen=True)
class _PageHome:
    """Where pages are: ``resident`` ones in memory, in any case, and all others in ``placement``.

    ``inside`` is what is in memory, ``outside`` what is not, ``spilled_bytes`` in all.
    """

    placement: Placement
    resident: frozenset[int]
    inside: PageOccupancy
    outside: PageOccupancy
    spilled_bytes: int


class _CutProgram:
    """A program cut into segments, before the numbers of bands are chosen."""

    def __init__(
        self,
        program: StreamProgram,
        cost_model: StreamCostModel,
        cuts: tuple[int, ...],
        store: JsonCacheTable,
    ) -> None:
        self._program, self._cost_model, self._cuts = program, cost_model, cuts
        self._segments = cut_segments(program, cuts)
        self._lifetimes = page_lifetimes(program, self._segments)
        self._all_pages = PageOccupancy(len(self._segments), self._lifetimes.values())
        self._costs = [
            SegmentCostEstimator(
                program, part, f"{cuts} {place}", store, only_segment=len(self._segments) == 1
            )
            for place, part in enumerate(self._segments)
        ]

    def drafts(
        self, caps: Sequence[int], placements: Sequence[Placement], resident_shares: Sequence[float]
    ) -> Iterator[StreamLayout]:
        """Yield drafts that differ in band heights and page places."""
        # A layout without pages is the same for all places.
        homes = [
            home
            for place in (placements if self._all_pages.peak_bytes else placements[:1])
            for home in self._homes(place, resident_shares)
        ]
        for bands in dict.fromkeys(tuple(one.fewest(cap) for one in self._costs) for cap in caps):
            costs = [one.cost(number) for one, number in zip(self._costs, bands, strict=True)]
            for home in homes:
                yield StreamLayout(
                    self._cuts,
                    self._segments,
                    bands,
                    home.placement,
                    max(
                        home.inside.bytes_at(place) + size for place, (size, *_) in enumerate(costs)
                    ),
                    calls=sum(calls for _, calls, _ in costs),
                    copied_bytes=self._recomputed_bytes + sum(copied for *_, copied in costs),
                    spilled_bytes=home.spilled_bytes,
                    pages_bytes=self._all_pages.peak_bytes,
                    spilled_peak_bytes=home.outside.peak_bytes,
                    disk_peak_bytes=home.outside.disk_peak_bytes * (home.placement == "disk"),
                    cost_model=self._cost_model,
                    resident=home.resident,
                )

    def _homes(self, placement: Placement, resident_shares: Sequence[float]) -> Iterator[_PageHome]:
        """Yield the pages in one place, also with those in memory that fit in each share of all."""
        lives, count = self._lifetimes, len(self._segments)
        if placement == "memory":
            yield _PageHome(placement, frozenset(), self._all_pages, PageOccupancy(count), 0)
            return
        limits = [int(share * self._all_pages.peak_bytes) for share in (0.0, *resident_shares)]
        for resident in dict.fromkeys(
            select_resident_pages(lives, count, limit) for limit in limits
        ):
            spilled = [life for index, life in lives.items() if index not in resident]
            yield _PageHome(
                placement,
                resident,
                PageOccupancy(count, (lives[index] for index in resident)),
                PageOccupancy(count, spilled),
                sum(life.size for life in spilled),
            )

    @cached_property
    def _recomputed_bytes(self) -> int:
        """Bytes that steps read and write in segments after the first that runs them."""
        seen, moved, program = set[int](), 0, self._program
        for part in self._segments:
            for index in part.steps:
                step = program.steps[index]
                if index in seen and isinstance(step, RowOp) and not step.view:
                    moved += sum(map(program.bytes_of, (index, *step.inputs)))
            seen.update(part.steps)
        return moved
