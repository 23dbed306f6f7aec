"""Steps at which a program may be cut into segments."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.planner.segment_cost import live_bytes_at_cuts
from lowtide.streaming.rules.row_op import RowOp


class CutPoints:
    """Finds cuts before steps where fewer bytes are live than around them."""

    def __init__(self, program: StreamProgram) -> None:
        self._bytes = live_bytes_at_cuts(program)
        self._work, total = dict[int, int](), 0
        for index, step in program.steps.items():
            total += program.bytes_of(index) if isinstance(step, RowOp) and not step.view else 0
            self._work[index] = total
        self._total = total

    @cached_property
    def candidates(self) -> list[int]:
        """Steps before which a cut keeps fewer live bytes than around them."""
        steps = list(self._bytes)
        return [
            step
            for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
            if self._bytes[before] >= self._bytes[step] < self._bytes[after]
        ]

    def cuts(self, parts: int) -> tuple[int, ...]:
        """Return cuts into about ``parts`` segments of equal work, at few live bytes."""
        at = [self._work[place] for place in self.candidates]
        cuts = set()
        for part in range(1, parts):
            middle, half_width = self._total * part / parts, self._total / parts / 2
            near = self.candidates[
                bisect.bisect_left(at, middle - half_width) : bisect.bisect_right(
                    at, middle + half_width
                )
            ]
            if near:
                cuts.add(self._best(near, middle))
        return tuple(sorted(cuts))

    def _best(self, places: Sequence[int], middle: float) -> int:
        return min(places, key=lambda place: (self._bytes[place], abs(self._work[place] - middle)))
