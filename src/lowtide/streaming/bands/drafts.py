"""Drafts of layouts: where a program is cut, how high its bands are, and where its pages lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.core.units import MIB
from lowtide.memory.store import FactStore, cache_folder, code_digest
from lowtide.streaming.bands.cuts import Cutter
from lowtide.streaming.bands.pace import Pace, pace_of
from lowtide.streaming.bands.placement import Placement
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.rows import RowOp
from lowtide.streaming.bands.schedule import rows_of, units
from lowtide.streaming.bands.segments import Segment, last_reads, segment
from lowtide.streaming.bands.weigh import glance

# Into how many parts a program may be cut beyond what it needs, and the effort up to which
# operators are run again rather than their results kept.
_AGAIN = 128
_CUT = ((1, 0), (3, 0), (8, 0), (16, 0), (36, 0), (8, _AGAIN), (36, _AGAIN))
# Bands of a single segment fill what they may take but for this part of it.
_FILLED = 16
# Four times the bands have to save so much, or no more are tried.
_WORTH = 0.8


@dataclass(frozen=True)
class Layout:
    """A way to run a program: where it is cut (before which steps), the work that is done again
    rather than kept, the bands of each segment, and where pages are kept.

    ``bytes`` is the most that rows occupy in memory at once (of a draft roughly), ``calls`` how
    often an operator is run, ``copied_bytes`` what is put together for operators (of low bands
    mostly rows that two of them see) and what those that are run again read and write,
    ``pages_bytes`` the most that pages occupy at once, of which ``written_bytes`` is the sum;
    ``pace`` tells what time all that takes.
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
    pace: Pace

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others of its program."""
        return self.cuts, self.again, self.bands, self.pages

    @property
    def overhead_seconds(self) -> float:
        """Seconds beyond those of the operators, roughly."""
        pace = self.pace
        speed, again = pace.moved_bytes.get(self.pages), self.copied_bytes / pace.copied_bytes
        moving = 2 * self.written_bytes / speed if speed else 0.0
        return self.calls * pace.call_seconds + moving + again

    @property
    def cost(self) -> float:
        """What tells layouts apart: time, and memory at its price."""
        return self.overhead_seconds + self.bytes / MIB * self.pace.seconds_per_mib


def store_of(program: Program) -> FactStore:
    """What was found out about a program, kept on disk: it takes seconds to minutes."""
    return FactStore(f"bands-{program.digest}-{code_digest()}", cache_folder())


class Drafter:
    """Drafts layouts of one program; what it saw of a segment it does not look at again."""

    def __init__(self, program: Program) -> None:
        self._program, self._store = program, store_of(program)
        self.pace = pace_of(program)

    def drafts(
        self, caps: Sequence[int] = (), pages: Sequence[Placement] = ("memory", "disk")
    ) -> Iterator[Layout]:
        """Ways that differ in cuts, in the height of bands (which stay below ``caps``, or those of
        the device), and in where ``pages`` are kept."""
        for way in self._ways:
            seen = set[tuple[int, ...]]()
            for cap in caps or self.pace.caps:
                bands = tuple(glanced.fewest(cap) for glanced in way.glances)
                if bands in seen:
                    continue
                seen.add(bands)
                layout = way.layout(self._program, bands)
                # Without pages all places are the same.
                yield from way.placed(layout, pages if layout.pages_bytes else pages[:1])
            self._store.save()

    @cached_property
    def _ways(self) -> list[_Way]:
        """Cuts that differ in what they make of the program."""
        cutter, found = Cutter(self._program), dict[object, _Way]()
        for parts, again in _CUT:
            cuts = cutter.cuts(parts)
            segments = segment(self._program, cuts, again)
            kept = cuts, *(tuple(part.pages) for part in segments)
            found.setdefault(kept, _Way(cuts, again, segments, [
                _Glances(
                    self._program, part, f"{cuts} {again} {place}", self._store,
                    alone=len(segments) == 1,
                )
                for place, part in enumerate(segments)
            ]))  # fmt: skip
        return list(found.values())


@dataclass(frozen=True)
class _Way:
    """A program in segments, whatever their bands."""

    cuts: tuple[int, ...]
    again: int
    segments: list[Segment]
    glances: list[_Glances]

    def layout(self, program: Program, bands: tuple[int, ...]) -> Layout:
        """The draft with pages in memory.

        Pages count from where they are made until they were read for the last time.
        """
        seen = [glanced.at(number) for glanced, number in zip(self.glances, bands, strict=True)]
        gone = last_reads(self.segments)
        now = most = most_pages = written = 0
        for place, (part, (size, _, _)) in enumerate(zip(self.segments, seen, strict=True)):
            made = sum(program.bytes_of(one) for one in part.pages if one != program.output)
            going = sum(
                program.bytes_of(one) for one in gone.get(place, ())
                if one not in program.graph.inputs
            )  # fmt: skip
            # What is read for the last time goes as what is written comes.
            here = max(now, now + made - going)
            most, most_pages = max(most, here + size), max(most_pages, here)
            now, written = now + made - going, written + made
        return Layout(
            self.cuts, self.again, self.segments, bands, "memory", most,
            calls=sum(calls for _, calls, _ in seen),
            copied_bytes=self._again_bytes(program) + sum(copied for _, _, copied in seen),
            written_bytes=written, pages_bytes=most_pages, pace=pace_of(program),
        )  # fmt: skip

    def placed(self, layout: Layout, pages: Sequence[Placement]) -> Iterator[Layout]:
        """``layout``, whose pages are in memory, with pages in each of these places."""
        bands = max(
            one.at(number)[0] for one, number in zip(self.glances, layout.bands, strict=True)
        )
        for place in pages:
            yield replace(layout, pages=place, bytes=layout.bytes if place == "memory" else bands)

    def _again_bytes(self, program: Program) -> int:
        """What steps read and write in other segments than the first that has them."""
        seen, moved = set[int](), 0
        for part in self.segments:
            for index in part.steps:
                step = program.steps[index]
                if index in seen and isinstance(step, RowOp) and not step.view:
                    moved += sum(map(program.bytes_of, (index, *step.inputs)))
            seen.update(part.steps)
        return moved


class _Glances:
    """What one segment takes in how many bands, each looked at once."""

    def __init__(
        self, program: Program, part: Segment, name: str, store: FactStore, *, alone: bool
    ) -> None:
        self._program, self._part, self.alone = program, part, alone
        self._name, self._store = name, store
        self._known: dict[int, tuple[int, int, int]] = {}
        self._units = units(program, part)
        self._most = max(
            (rows.size // rows.grain for rows in rows_of(program, part)), default=1
        )

    def at(self, number: int) -> tuple[int, int, int]:
        """(bytes, calls, bytes put together) in so many bands."""
        if number not in self._known:
            even = self._even(number)
            key = f"glance {self._name} {even}"
            found = self._store.get(key)
            if found is None:
                found = glance(self._program, self._part, even)
                self._store.put(key, found)
            self._known[number] = found[0], found[1], found[2]
        return self._known[number]

    def _even(self, number: int) -> int:
        """As many bands as there are whole windows for, or fewer that are as high at most."""
        if number > self._units:
            return -(-number // self._units) * self._units
        return -(-self._units // -(-self._units // number))

    def _fewer(self, number: int, cap: int) -> int:
        """Between half of ``number``, which is too few, and ``number``, so that bands fill
        ``cap``: images of any size then take nearly the same."""
        low = number // 2
        while number - low > max(1, number // _FILLED):
            middle = (low + number) // 2
            if self.at(middle)[0] <= cap:
                number = middle
            else:
                low = middle
        return number

    def fewest(self, cap: int) -> int:
        """The fewest bands that stay below ``cap``, or those that take least."""
        number, seen = 1, list[int]()
        while True:
            size, *_ = self.at(number)
            if size <= cap:
                return self._even(self._fewer(number, cap) if self.alone else number)
            seen.append(size)
            if number >= self._most or (len(seen) > 2 and size > seen[-3] * _WORTH):
                least = min(self._known, key=lambda one: (self._known[one][0], one))
                return self._even(least)
            more = min(2 * number, self._most)
            # A whole window each, before any is cut.
            number = self._units if number < self._units < more else more
