"""Choice of results whose halo rows each band recomputes instead of holding.

Holding rows and concatenating new ones copies all of them, which takes a GPU about half as long
as a light convolution with its activation. If the layer before recomputes a few halo rows, and
the one before that a few more, only one layer of a chain needs the copy.
Accuracy: exact to rounding, as all bands.
"""

from __future__ import annotations

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.rules.light_conv import STRIDED_INPUT_OPS
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import op_name

# Most halo rows computed twice. In a chain of k layers a copy costs 1/(2k), and k - 1 rows are
# computed twice on average: a band of 200 rows is fastest with about 10 layers of 3×3 kernels;
# fewer layers take less memory.
_MAX_HALO_ROWS = 16
# Halo rows are at most 1/_PART of a band: narrow bands would be computed twice as a whole.
_HALO_DIVISOR = 2
# A convolution whose result has this many times the bytes of its input is light too, even with
# its input copied.
_LIGHT_EXPANSION = 8


def recomputed_results(program: StreamProgram, segment: Segment, bands: int) -> frozenset[int]:
    """Return the results of a segment whose halo rows each of its bands recomputes.

    Empty on the CPU.

    Args:
        program: Program of the segment.
        segment: Segment to run.
        bands: Number of bands of the segment.
    """
    if program.graph.on_cpu:
        return frozenset()
    kept = {*segment.pages, *program.outputs}
    readers = _readers(program, segment)
    halo_rows: dict[int, int] = {}
    for index in reversed(segment.steps):
        step = program.steps[index]
        if index in kept or not isinstance(step, RowOp) or not _is_light(program, index, step):
            continue
        halo = _halo_rows(program, index, readers.get(index, []), halo_rows)
        most = min(_MAX_HALO_ROWS, step.rows.size // max(bands, 1) // _HALO_DIVISOR)
        # At the end of a chain rows of a convolution's result are held: its input then needs as
        # many more rows as its kernel overlaps.
        if halo is not None and 0 < halo <= most - step.overlap:
            halo_rows[index] = halo
    return frozenset(halo_rows)


def _readers(program: StreamProgram, segment: Segment) -> dict[int, list[int]]:
    """Return by result the steps of the segment that read it."""
    found: dict[int, list[int]] = {}
    for index in segment.steps:
        step = program.steps[index]
        for one in {*step.inputs, *program.full_inputs(index)}:
            found.setdefault(one, []).append(index)
    return found


def _is_light(program: StreamProgram, index: int, step: RowOp) -> bool:
    """Whether recomputing rows of a step is cheaper than copying held ones."""
    if step.rows.grain != 1:
        return False
    input_bytes = sum(map(program.row_bytes, step.inputs))
    return (
        step.overlap > 0
        or op_name(program.graph.nodes[index].target) in STRIDED_INPUT_OPS
        or (step.padded and _LIGHT_EXPANSION * input_bytes <= program.row_bytes(index))
    )


def _halo_rows(
    program: StreamProgram, index: int, readers: list[int], halo_rows: dict[int, int]
) -> int | None:
    """Return how many rows of a result two bands need; None if each is needed once.

    None if some reader must get each row exactly once.
    """
    halo = 0
    for reader in readers:
        step = program.steps[reader]
        if not isinstance(step, RowOp) or step.rows.size != program.rows[index].size:
            return None
        if step.overlap:
            halo = max(halo, halo_rows.get(reader, 0) + step.overlap)
        elif reader in halo_rows:
            halo = max(halo, halo_rows[reader])
        else:
            return None
    return halo
