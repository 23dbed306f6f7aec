"""Bytes that steps and bands compute: the measure of work for progress."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lowtide.streaming.engine.band_schedule import Band
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.rules.row_op import Reduction, RowOp
from lowtide.streaming.spans import Span, count


def bytes_of_step(program: StreamProgram, index: int) -> int:
    """Return the bytes that a step computes or reduces in all bands."""
    step = program.steps[index]
    results = step.inputs if isinstance(step, Reduction) else [index]
    return sum(map(program.bytes_of, results))


def bytes_of_band(program: StreamProgram, band: Band) -> int:
    """Return the bytes that a band computes or reduces."""
    steps, row_bytes = program.steps, program.row_bytes
    made = sum(count(spans) * row_bytes(index) for index, spans in band.computed.items())
    reduced = sum(
        count(spans) * row_bytes(one)
        for index, spans in band.targets.items()
        if isinstance(step := steps[index], Reduction)
        for one in step.inputs
    )
    return made + reduced


def step_peak_bytes(
    program: StreamProgram, index: int, span: Span, pieces: Iterable[Tensor]
) -> int:
    """Estimate the peak bytes of a step for one span: its result and its workspace.

    Args:
        program: Program of the step.
        index: Node index of the step.
        span: Rows of the result.
        pieces: Input rows of the step, (B, C, rows, W) for images.
    """
    step = program.steps[index]
    assert isinstance(step, RowOp)
    result = (span[1] - span[0]) * program.row_bytes(index)
    input_bytes = sum(piece.nbytes for piece in pieces)
    return result + step.workspace_bytes(span[1] - span[0], input_bytes, result)
