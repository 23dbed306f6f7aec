"""How long pages live, and which of them stay in memory where others are kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, readers


@dataclass(frozen=True)
class PageLifetime:
    """A page of ``size`` bytes, made by segment ``first`` and read for the last time by ``last``;
    so many segments ``reads`` it."""

    size: int
    first: int
    last: int
    reads: int

    @property
    def worth(self) -> float:
        """How often it would be moved, for each segment in which it would take memory."""
        return (1 + self.reads) / (self.last - self.first + 1)


def page_lifetimes(program: StreamProgram, segments: Sequence[Segment]) -> dict[int, PageLifetime]:
    """Of all pages but the result, which goes where the result goes."""
    found, read = dict[int, PageLifetime](), readers(segments)
    for place, part in enumerate(segments):
        for index in part.pages:
            if index != program.output:
                # One that nothing reads stays to the end.
                places = read.get(index, [])
                last = places[-1] if places else len(segments)
                found[index] = PageLifetime(program.bytes_of(index), place, last, len(places))
    return found


class PageOccupancy:
    """What pages occupy while each of ``count`` segments runs."""

    def __init__(self, count: int, pages: Iterable[PageLifetime] = ()) -> None:
        # What is read for the last time goes as what is written comes.
        self._before, self._after, self._touched = ([0] * count for _ in range(3))
        for life in pages:
            self.add(life)

    def add(self, life: PageLifetime) -> None:
        """One page more."""
        for place, before, after in self._with(life):
            self._before[place], self._after[place] = before, after
            self._touched[place] += life.size

    def _with(self, life: PageLifetime) -> Iterator[tuple[int, int, int]]:
        """By segment that a page touches what would be occupied before and after it."""
        for place in range(life.first, min(life.last + 1, len(self._before))):
            before = self._before[place] + life.size * (place > life.first)
            yield place, before, self._after[place] + life.size * (place < life.last)

    def at(self, place: int) -> int:
        """While a segment runs."""
        return max(self._before[place], self._after[place])

    def would_be(self, life: PageLifetime) -> int:
        """The most while a page lives, if it were added."""
        return max(max(before, after) for _, before, after in self._with(life))

    @property
    def most(self) -> int:
        """While any segment runs."""
        return max(map(max, self._before, self._after), default=0)

    @property
    def most_in_files(self) -> int:
        """The same where none goes before the segment that reads it last is over."""
        return max(self._touched, default=0)


def select_resident(pages: Mapping[int, PageLifetime], count: int, limit: int) -> frozenset[int]:
    """Those pages to keep in ``limit`` bytes of memory that spare most moving: such as are read
    soon and again and again, before those that wait."""
    found, occupied = set[int](), PageOccupancy(count)
    for index, life in sorted(pages.items(), key=lambda one: (-one[1].worth, one[1].first)):
        if occupied.would_be(life) <= limit:
            occupied.add(life)
            found.add(index)
    return frozenset(found)
