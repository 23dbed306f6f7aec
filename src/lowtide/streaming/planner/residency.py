"""Lifetimes of pages, and the choice of pages that stay resident in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, page_readers


@dataclass(frozen=True)
class PageLifetime:
    """A page's size in bytes, the segments that write and last read it, and its reads.

    ``first`` is the segment that writes it, ``last`` the last that reads it, ``reads`` the number
    of segments that read it.
    """

    size: int
    first: int
    last: int
    reads: int

    @property
    def transfers_saved(self) -> float:
        """Transfers saved per segment for which the page would occupy memory."""
        return (1 + self.reads) / (self.last - self.first + 1)


def page_lifetimes(program: StreamProgram, segments: Sequence[Segment]) -> dict[int, PageLifetime]:
    """Return the lifetimes of all pages except the result.

    The result is stored where the caller wants it.
    """
    found, read = dict[int, PageLifetime](), page_readers(segments)
    for place, part in enumerate(segments):
        for index in part.pages:
            if index != program.output:
                # A page that nothing reads stays to the end.
                places = read.get(index, [])
                last = places[-1] if places else len(segments)
                found[index] = PageLifetime(program.bytes_of(index), place, last, len(places))
    return found


class PageOccupancy:
    """Bytes of pages while each of ``count`` segments runs."""

    def __init__(self, count: int, pages: Iterable[PageLifetime] = ()) -> None:
        # Pages that are read for the last time shrink while those that are written grow.
        self._before, self._after, self._touched = ([0] * count for _ in range(3))
        for life in pages:
            self.add(life)

    def add(self, life: PageLifetime) -> None:
        """Add one page."""
        for place, before, after in self._bytes_with(life):
            self._before[place], self._after[place] = before, after
            self._touched[place] += life.size

    def _bytes_with(self, life: PageLifetime) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, bytes before, bytes after) if the page were added."""
        for place in range(life.first, min(life.last + 1, len(self._before))):
            before = self._before[place] + life.size * (place > life.first)
            yield place, before, self._after[place] + life.size * (place < life.last)

    def bytes_at(self, place: int) -> int:
        """Return the peak while a segment runs."""
        return max(self._before[place], self._after[place])

    def peak_with(self, life: PageLifetime) -> int:
        """Return the peak over a page's lifetime if it were added."""
        return max(max(before, after) for _, before, after in self._bytes_with(life))

    @property
    def peak_bytes(self) -> int:
        """Peak over all segments."""
        return max(map(max, self._before, self._after), default=0)

    @property
    def disk_peak_bytes(self) -> int:
        """Peak over all segments where each page is freed only after its last reader ends."""
        return max(self._touched, default=0)


def select_resident(pages: Mapping[int, PageLifetime], count: int, limit: int) -> frozenset[int]:
    """Select pages to keep in ``limit`` bytes of memory to save most transfers.

    Pages that are read soon and often come before those that wait.
    """
    found, occupied = set[int](), PageOccupancy(count)
    for index, life in sorted(
        pages.items(), key=lambda one: (-one[1].transfers_saved, one[1].first)
    ):
        if occupied.peak_with(life) <= limit:
            occupied.add(life)
            found.add(index)
    return frozenset(found)
