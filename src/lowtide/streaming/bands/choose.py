"""Choosing where a program is cut and how high its bands are."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes
from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.rows import Reduction, RowOp, Rows
from lowtide.streaming.bands.segments import Segment, segment
from lowtide.streaming.bands.weigh import Weight, band_bytes, crossing, weigh

Placement = Literal["memory", "disk"]

# Into how many parts a program may be cut beyond what it needs.
_PARTS = (1, 3, 8, 16, 36)
# What the bands of a segment should stay below; the small ones are tried where memory is scarce.
_CAPS = tuple(mib * MIB for mib in (16, 64, 128, 256, 512))
_SMALL_CAPS = tuple(mib * MIB for mib in (1, 4, 8))
# Four times the bands have to save so much, or no more are tried: each is planned call by call.
_WORTH = 0.8
# Python between two operators, and what a disk moves in a second: for comparing layouts only.
_CALL_SECONDS, _DISK_BYTES = 4e-5, 1 << 30
# Memory has to buy time: so much of a second for each MiB more.
_SECONDS_PER_MIB = 2e-4


@dataclass(frozen=True)
class Layout:
    """A way to run a program: its segments, the bands of each, and where pages are kept."""

    segments: list[Segment]
    bands: list[int]
    weight: Weight
    pages: Placement = "memory"

    @property
    def bytes(self) -> int:
        """The most that rows occupy in memory at once."""
        return self.weight.rows_bytes if self.pages == "memory" else self.weight.bands_bytes

    @property
    def cost(self) -> float:
        """Seconds beyond those that every layout takes, roughly."""
        moved = 2 * self.weight.written_bytes if self.pages == "disk" else 0
        return (
            self.weight.calls * _CALL_SECONDS + moved / _DISK_BYTES
            + self.bytes / MIB * _SECONDS_PER_MIB
        )  # fmt: skip


def choose(
    program: Program, limit_bytes: int | None, pages: Placement | Literal["auto"] = "auto"
) -> Layout:
    """The layout that costs least within ``limit_bytes`` for rows (None: no limit).

    Raises `BudgetError` naming the least that any layout takes.
    """
    found: list[Layout] = []
    for caps in (_CAPS, _SMALL_CAPS):
        found += layouts(program, pages, caps)
        fitting = [one for one in found if limit_bytes is None or one.bytes <= limit_bytes]
        if fitting:
            break
    else:
        least = min(found, key=lambda one: one.bytes)
        raise BudgetError(
            f"bands of this model take {format_bytes(least.bytes)} at least,"
            f" {format_bytes(limit_bytes or 0)} allowed",
            smallest=least.bytes,
        )
    return min(fitting, key=lambda one: one.cost)


def layouts(
    program: Program, pages: Placement | Literal["auto"] = "auto",
    caps: Sequence[int] = _CAPS,
) -> Iterator[Layout]:  # fmt: skip
    """Ways that differ in cuts, in the height of bands, and in where pages are kept."""
    cutter, seen = Cutter(program), set[tuple[object, ...]]()
    for parts in _PARTS:
        cuts = cutter.cuts(parts)
        if cuts in seen:
            continue
        seen.add(cuts)
        segments = segment(program, cuts)
        sizes = [dict[int, int]() for _ in segments]
        for cap in caps:
            bands = [
                _bands(program, part, cap, known)
                for part, known in zip(segments, sizes, strict=True)
            ]
            if (cuts, *bands) in seen:
                continue
            seen.add((cuts, *bands))
            weight = weigh(program, segments, bands)
            if pages != "disk":
                yield Layout(segments, bands, weight)
            if pages == "disk" or (pages == "auto" and weight.pages_bytes):
                yield Layout(segments, bands, weight, "disk")


def _bands(program: Program, part: Segment, cap: int, known: dict[int, int]) -> int:
    """The fewest bands of a segment that stay below ``cap``, or those that take least."""
    most = max((rows.size // rows.grain for rows in _target_rows(program, part)), default=1)
    number = 1
    while True:
        if number not in known:
            known[number] = band_bytes(program, part, number)
        if known[number] <= cap:
            return number
        before = known.get(number // 4, 0)
        if number >= most or (before and known[number] > before * _WORTH):
            return min(known, key=lambda one: (known[one], one))
        number = min(2 * number, most)


def _target_rows(program: Program, part: Segment) -> Iterator[Rows]:
    for index in part.steps:
        step = program.steps[index]
        if isinstance(step, (RowOp, Reduction)):
            yield step.rows


class Cutter:
    """Where a program may be cut: before steps at which less has to be kept than around them."""

    def __init__(self, program: Program) -> None:
        self._bytes = crossing(program)
        self._work, total = dict[int, int](), 0
        for index, step in program.steps.items():
            total += program.bytes_of(index) if isinstance(step, RowOp) and not step.view else 0
            self._work[index] = total
        self._total = total

    @cached_property
    def places(self) -> list[int]:
        """Steps before which a cut makes sense."""
        steps = list(self._bytes)
        return [
            step for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
            if self._bytes[before] >= self._bytes[step] < self._bytes[after]
        ]  # fmt: skip

    def cuts(self, parts: int) -> tuple[int, ...]:
        """Cuts into about ``parts`` parts of equal work, each where least is kept."""
        at = [self._work[place] for place in self.places]
        cuts = set()
        for part in range(1, parts):
            middle, reach = self._total * part / parts, self._total / parts / 2
            near = self.places[
                bisect.bisect_left(at, middle - reach) : bisect.bisect_right(at, middle + reach)
            ]
            if near:
                cuts.add(self._best(near, middle))
        return tuple(sorted(cuts))

    def _best(self, places: Sequence[int], middle: float) -> int:
        return min(places, key=lambda place: (
            self._bytes[place], abs(self._work[place] - middle)
        ))  # fmt: skip
