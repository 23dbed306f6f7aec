"""Rules of operators that move rows: slice, cat, roll, flip, pad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.rule import (
    InputSpans,
    LoweringContext,
    RowAxis,
    RowKernel,
    RowOp,
    Rule,
    banded_op,
    node_argument,
    normalize_dims,
)
from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class RowRange:
    """Result rows ``first`` to ``last``, copied from an input or filled.

    ``source`` is the position of the source, or -1 for the fill value. Rows come from row ``start``
    on, every ``step``-th of them, or upward with ``step`` -1.
    """

    first: int
    last: int
    source: int
    start: int = 0
    step: int = 1

    def clip(self, span: Span) -> RowRange | None:
        """Return the part within a span of the result, or None."""
        first, last = max(self.first, span[0]), min(self.last, span[1])
        if first >= last:
            return None
        start = self.start + self.step * (first - self.first)
        return RowRange(first, last, self.source, start, self.step)

    @property
    def source_span(self) -> Span:
        """Rows of the source."""
        end = self.start + self.step * (self.last - self.first - 1)
        return min(self.start, end), max(self.start, end) + 1


def gather_ranges(
    rows: RowAxis,
    inputs: tuple[int, ...],
    ranges: list[RowRange],
    fill: float = 0.0,
    transform: Any = None,
    full_inputs: tuple[int, ...] = (),
) -> RowOp:
    """Return an operator that concatenates row ranges.

    Any row can be computed alone, whatever the grain of the inputs.

    Args:
        rows: Row axis of the result.
        inputs: Nodes of the sources with rows.
        ranges: Row ranges in order, which cover the result.
        fill: Value of rows without a source.
        transform: Applied to the result for the other dims.
        full_inputs: Nodes of the sources without rows, numbered after the others.
    """

    def parts(span: Span) -> list[RowRange]:
        return [part for one in ranges if (part := one.clip(span)) is not None]

    def needed(span: Span) -> InputSpans:
        return tuple(
            [part.source_span for part in parts(span) if part.source == place]
            for place in range(len(inputs))
        )

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        used = [0] * len(pieces)
        found = []
        for part in parts(span):
            if part.source < 0:
                shape = list(pieces[0].shape)
                shape[rows.dim] = part.last - part.first
                found.append(pieces[0].new_full(shape, fill))
                continue
            first, last = part.source_span
            if part.source < len(pieces):
                piece = pieces[part.source].narrow(rows.dim, used[part.source], last - first)
                used[part.source] += last - first
            else:
                # copied, since what reads the result may write into its memory
                piece = (
                    whole[part.source - len(pieces)].narrow(rows.dim, first, last - first).clone()
                )
            if part.step != 1:
                every = (*[slice(None)] * rows.dim, slice(None, None, part.step))
                piece = piece.flip(rows.dim) if part.step < 0 else piece[every]
            found.append(piece)
        result = found[0] if len(found) == 1 else torch.cat(found, rows.dim)
        return result if transform is None else transform(result)

    return RowOp(RowAxis(rows.dim, rows.size), inputs, full_inputs, needed, run, cheap=True)


def lower_roll(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a roll; wrapped rows come from the other end."""
    rows = context.row_axis(node.args[0])
    dims = node_argument(node, 2, "dims", [])
    if rows is None or not dims:
        return None
    shifts = node_argument(node, 1, "shifts")
    pairs = list(
        zip(
            shifts if isinstance(shifts, (list, tuple)) else [shifts],
            normalize_dims(dims, len(node.meta.shape)),
            strict=True,
        )
    )
    shift_rows = sum(shift for shift, dim in pairs if dim == rows.dim) % rows.size
    others = [(shift, dim) for shift, dim in pairs if dim != rows.dim and shift]

    def across(result: Tensor) -> Tensor:
        return torch.roll(result, *(list(each) for each in zip(*others, strict=True)))

    if not shift_rows:
        return banded_op(node, context, rows, cheap=True)
    ranges = [
        RowRange(0, shift_rows, 0, rows.size - shift_rows),
        RowRange(shift_rows, rows.size, 0, 0),
    ]
    return gather_ranges(rows, (node.args[0].node,), ranges, transform=across if others else None)


def lower_repeat(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a repeat, of all rows after each other or of other dims."""
    rows, times = context.row_axis(node.args[0]), node_argument(node, 1, "repeats")
    if rows is None:
        return None
    dim = rows.dim + len(times) - len(context.meta(node.args[0]).shape)
    found = RowAxis(dim, rows.size * times[dim], rows.grain)
    if times[dim] == 1:
        return banded_op(node, context, found, cheap=True)
    if dim != rows.dim:
        return None
    ranges = [RowRange(at * rows.size, (at + 1) * rows.size, 0) for at in range(times[dim])]
    others = [1 if at == dim else count for at, count in enumerate(times)]
    across = (lambda result: result.repeat(others)) if set(others) != {1} else None
    return gather_ranges(found, (node.args[0].node,), ranges, transform=across)


def lower_flip(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a flip."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    others = [dim for dim in normalize_dims(node.args[1], len(node.meta.shape)) if dim != rows.dim]
    if len(others) == len(node.args[1]):
        return banded_op(node, context, rows, cheap=True)

    def across(result: Tensor) -> Tensor:
        return result.flip(others)

    row_range = RowRange(0, rows.size, 0, rows.size - 1, -1)
    return gather_ranges(
        rows, (node.args[0].node,), [row_range], transform=across if others else None
    )


def lower_slice(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a slice along the rows or another dim."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    dim = node_argument(node, 1, "dim", 0) % len(node.meta.shape)
    if dim != rows.dim:
        return banded_op(node, context, rows, cheap=True, view=True)
    start, step = node_argument(node, 2, "start", 0) or 0, node_argument(node, 4, "step", 1)
    start += rows.size if start < 0 else 0
    size = node.meta.shape[dim]
    if size == rows.size:
        return banded_op(node, context, rows, cheap=True, view=True)
    ranges = [RowRange(0, size, 0, start, step)]
    return gather_ranges(RowAxis(dim, size), (node.args[0].node,), ranges)


def lower_windows(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower `Tensor.unfold`, windows of one dim that may overlap."""
    rows, (dim, size, step) = context.row_axis(node.args[0]), node.args[1:4]
    if rows is None:
        return None
    # copied, since what overlaps could not be written to
    copied = replace(node, target=_copied_windows)
    if dim % (len(node.meta.shape) - 1) != rows.dim:
        return banded_op(copied, context, rows, cheap=True)
    kernel, found = RowKernel(size, step, 0), RowAxis(rows.dim, node.meta.shape[rows.dim])
    needed = kernel.receptive_field
    return banded_op(copied, context, found, input_spans=lambda span: ([needed(span)],), cheap=True)


def _copied_windows(tensor: Tensor, dim: int, size: int, step: int) -> Tensor:
    return tensor.unfold(dim, size, step).contiguous()


def lower_concatenate(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a cat along the rows or another dim."""
    refs = node.args[0]
    dim = node_argument(node, 1, "dim", 0) % len(node.meta.shape)
    each = [context.row_axis(ref) for ref in refs]
    if len({rows.dim for rows in each if rows is not None}) > 1:
        each = [
            _along(dim, rows, context.meta(ref).shape) for rows, ref in zip(each, refs, strict=True)
        ]
    known = [rows for rows in each if rows is not None]
    if not known or len({rows.dim for rows in known}) != 1:
        return None
    grain = math.lcm(*(rows.grain for rows in known))
    rows = RowAxis(known[0].dim, node.meta.shape[known[0].dim], grain)
    if dim != rows.dim:
        if len({found.size for found in known}) != 1:
            return None
        slices = {
            ref.node: rows.dim for ref, found in zip(refs, each, strict=True) if found is None
        }
        return banded_op(node, context, rows, sliced_dims=slices, cheap=True)
    nodes = dict.fromkeys(ref.node for ref in refs)
    inputs = tuple(one for one in nodes if one in context.rows)
    full_inputs = tuple(one for one in nodes if one not in context.rows)
    ranges, first = [], 0
    for ref in refs:
        last = first + context.meta(ref).shape[dim]
        ranges.append(RowRange(first, last, (*inputs, *full_inputs).index(ref.node)))
        first = last
    return gather_ranges(rows, inputs, ranges, full_inputs=full_inputs)


def _along(dim: int, rows: RowAxis | None, shape: Sequence[int]) -> RowAxis | None:
    """Return the row axis of a tensor; that of a single row may be any dim of size 1."""
    return RowAxis(dim, 1) if rows is not None and rows.size == shape[dim] == 1 else rows


def lower_stack(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a stack."""
    each = [context.row_axis(ref) for ref in node.args[0]]
    if any(rows is None for rows in each) or len(set(each)) != 1 or each[0] is None:
        return None
    at = node_argument(node, 1, "dim", 0) % len(node.meta.shape)
    dim = each[0].dim + (at <= each[0].dim)
    return banded_op(node, context, RowAxis(dim, each[0].size, each[0].grain), cheap=True)


def lower_pad(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a constant, reflect, replicate or circular pad."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    pad, rank = list(node_argument(node, 1, "pad")), len(node.meta.shape)
    mode, value = node_argument(node, 2, "mode", "constant"), node_argument(node, 3, "value", 0.0)
    place = 2 * (rank - 1 - rows.dim)
    above, below = (pad[place], pad[place + 1]) if place < len(pad) else (0, 0)
    if not above and not below:
        return banded_op(node, context, rows, cheap=True)
    if mode not in _PAD_RANGES:
        return None
    others = [0 if index in (place, place + 1) else side for index, side in enumerate(pad)]
    fill = float(value or 0.0) if mode == "constant" else 0.0

    def across(result: Tensor) -> Tensor:
        if mode == "constant":
            return F.pad(result, others, value=fill)
        return F.pad(result, others, mode=mode)

    found = RowAxis(rows.dim, rows.size + above + below)
    return gather_ranges(
        found,
        (node.args[0].node,),
        _PAD_RANGES[mode](rows.size, above, below),
        fill,
        across if any(others) else None,
    )


def _constant(size: int, above: int, below: int) -> list[RowRange]:
    # negative padding crops
    skip, end = max(0, -above), size + min(0, below)
    first = max(0, above)
    return [
        RowRange(0, first, -1),
        RowRange(first, first + end - skip, 0, skip),
        RowRange(first + end - skip, size + above + below, -1),
    ]


def _reflected(size: int, above: int, below: int) -> list[RowRange]:
    return [
        RowRange(0, above, 0, above, -1),
        RowRange(above, above + size, 0),
        RowRange(above + size, above + size + below, 0, size - 2, -1),
    ]


def _replicated(size: int, above: int, below: int) -> list[RowRange]:
    return [
        *(RowRange(row, row + 1, 0, 0) for row in range(above)),
        RowRange(above, above + size, 0),
        *(
            RowRange(above + size + row, above + size + row + 1, 0, size - 1)
            for row in range(below)
        ),
    ]


def _circular(size: int, above: int, below: int) -> list[RowRange]:
    return [
        RowRange(0, above, 0, size - above),
        RowRange(above, above + size, 0),
        RowRange(above + size, above + size + below, 0, 0),
    ]


_PAD_RANGES = {
    "constant": _constant,
    "reflect": _reflected,
    "replicate": _replicated,
    "circular": _circular,
}


RULES: dict[str, Rule] = {
    "roll": lower_roll,
    "flip": lower_flip,
    "repeat": lower_repeat,
    "slice": lower_slice,
    "unfold": lower_windows,
    "cat": lower_concatenate,
    "concat": lower_concatenate,
    "concatenate": lower_concatenate,
    "stack": lower_stack,
    "pad": lower_pad,
}
