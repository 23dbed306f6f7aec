"""Results of which two bands make the same few rows, rather than one for both.

To hold rows and put new ones beside them is a copy of all of them, which takes a card about half as
long as a light convolution and what follows it. Where the layer before makes the few rows once
more, and the one before that a few more still, only every so many layers have such a copy.
Accuracy: exact to rounding, as all bands.
"""

from __future__ import annotations

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.rules.light_conv import TAKE_PARTS
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import op_name

# Rows that are made twice at most. Of a chain of k layers a copy is 1/(2k), and with rows of k - 1
# made twice on average a band of 200 rows takes least with about 10 of 3 × 3 pixels; few of them
# take less memory.
_MOST = 16
# And of a band this part, since low bands would be made twice as a whole.
_PART = 2
# A convolution of an image to so many times its bytes is light too, whatever is copied before it.
_WIDER = 8


def recomputed_results(program: StreamProgram, segment: Segment, bands: int) -> frozenset[int]:
    """Results of a segment in so many bands whose rows are made by each band that takes them."""
    if program.graph.on_cpu:
        return frozenset()
    kept = {*segment.pages, program.output}
    readers = _readers(program, segment)
    rows: dict[int, int] = {}
    for index in reversed(segment.steps):
        step = program.steps[index]
        if index in kept or not isinstance(step, RowOp) or not _is_light(program, index, step):
            continue
        twice = _rows_twice(program, index, readers.get(index, []), rows)
        most = min(_MOST, step.rows.size // max(bands, 1) // _PART)
        # Where a chain ends, rows are held of what a convolution makes: of what it takes there are
        # as many more as it looks at.
        if twice is not None and 0 < twice <= most - step.overlap:
            rows[index] = twice
    return frozenset(rows)


def _readers(program: StreamProgram, segment: Segment) -> dict[int, list[int]]:
    """By result the steps of the segment that take it."""
    found: dict[int, list[int]] = {}
    for index in segment.steps:
        step = program.steps[index]
        for one in {*step.inputs, *program.wholes(index)}:
            found.setdefault(one, []).append(index)
    return found


def _is_light(program: StreamProgram, index: int, step: RowOp) -> bool:
    if step.rows.grain != 1:
        return False
    given = sum(map(program.row_bytes, step.inputs))
    return (
        step.overlap > 0
        or op_name(program.graph.nodes[index].target) in TAKE_PARTS
        or (step.framed and _WIDER * given <= program.row_bytes(index))
    )


def _rows_twice(
    program: StreamProgram, index: int, readers: list[int], rows: dict[int, int]
) -> int | None:
    """How many rows of a result two bands take; None where something takes it that has to be given
    each row once."""
    most = 0
    for reader in readers:
        step = program.steps[reader]
        if not isinstance(step, RowOp) or step.rows.size != program.rows[index].size:
            return None
        if step.overlap:
            most = max(most, rows.get(reader, 0) + step.overlap)
        elif reader in rows:
            most = max(most, rows[reader])
        else:
            return None
    return most
