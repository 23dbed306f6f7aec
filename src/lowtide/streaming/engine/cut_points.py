"""Steps at which a program may be cut into segments."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cached_property

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.row_op import Reduction, RowOp


class CutPoints:
    """Finds cuts before steps where fewer bytes are live than around them."""

    def __init__(self, program: StreamProgram) -> None:
        self._bytes = _live_bytes(program)
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


def _live_bytes(program: StreamProgram) -> dict[int, int]:
    """Return, by step, the bytes of row results made before it and needed from it on."""
    last: dict[int, int] = {}
    order = {index: at for at, index in enumerate(program.steps)}
    for index, step in program.steps.items():
        if isinstance(step, (RowOp, Reduction)):
            for one in step.inputs:
                last[program.view_base(one)] = order[index]
    change = [0] * (len(order) + 1)
    for index, until in last.items():
        made = order.get(index)
        if made is not None and made < until:
            size = program.bytes_of(index)
            change[made + 1] += size
            change[until + 1] -= size
    found, total = {}, 0
    for index, at in order.items():
        total += change[at]
        found[index] = total
    return found
