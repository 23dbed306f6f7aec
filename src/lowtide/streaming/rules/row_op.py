"""Operators on bands of image rows: row axis, row operator and reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowtide.streaming.spans import Span, Spans


@dataclass(frozen=True)
class RowAxis:
    """Dim ``dim`` of a tensor that runs down the image, ``size`` long.

    Bands begin and end at multiples of ``grain``: for a tensor of windows, one row of windows is a
    grain.
    """

    dim: int
    size: int
    grain: int = 1


# Rows that a band needs of each input with rows, in the order of the inputs.
Needs = tuple[Spans, ...]
# (span, input rows, arguments without rows) -> result rows. Arguments are tensors or lists of
# `MaskPattern`.
Run = Callable[[Span, Sequence[Tensor], Sequence[Any]], Tensor]
# The same with the tensor that the rows are written into.
Into = Callable[[Span, Sequence[Tensor], Sequence[Any], Tensor], object]


def _nothing(_: int) -> int:
    return 0


@dataclass(frozen=True)
class RowOp:
    """Operator on a band of rows.

    Attributes:
        rows: Row axis of the result.
        inputs: Nodes with rows.
        wholes: Nodes without rows.
        needed: Returns the rows of each input that a span of the result needs.
        run: Computes a span from these rows and the wholes.
        cheap: Recomputing the result takes less time than keeping it.
        view: The result shares the memory of the first input.
        sliced: Wholes that are sliced to the span, with the dim of each.
        patterned: Constants among the wholes that are passed as `MaskPattern`s of the span, with
            the dim of each.
        scratch: Workspace as a share of the bytes of its inputs and result.
        scratch_of: Workspace bytes for a number of rows.
        scratch_bytes: Workspace bytes of any band.
        framed: Bands at the image's ends are copied to pad them.
        over: By input, a form of ``run`` that may write the result into that input's memory.
        into: Form of ``run`` that writes into a given tensor.
        overlap: Rows that neighboring result rows both need, of operators so light that a GPU
            recomputes them faster than it concatenates held rows with new ones; 0 for all others.
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    wholes: tuple[int, ...]
    needed: Callable[[Span], Needs]
    run: Run
    cheap: bool = False
    view: bool = False
    sliced: Mapping[int, int] = field(default_factory=dict)
    patterned: Mapping[int, int] = field(default_factory=dict)
    scratch: float = 0.0
    scratch_of: Callable[[int], int] = _nothing
    scratch_bytes: int = 0
    framed: bool = False
    over: Mapping[int, Run] = field(default_factory=dict)
    into: Into | None = None
    overlap: int = 0

    def beside(self, rows: int, given: int, result: int) -> int:
        """Estimate the workspace bytes of a band.

        Args:
            rows: Rows of the result.
            given: Bytes of the input rows.
            result: Bytes of the result rows.
        """
        share = int(self.scratch * (given + result))
        return share + self.scratch_of(rows) + self.scratch_bytes


@dataclass(frozen=True)
class Reduction:
    """Reduction over all rows, accumulated band by band.

    Attributes:
        rows: Row axis of the inputs.
        inputs: Nodes with equally many rows.
        add: Returns the state, None at first, updated with the rows of a span.
        finish: Returns the result for a state, a tensor without rows.
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    add: Callable[[Any, Sequence[Tensor]], Any]
    finish: Callable[[Any], Tensor]


def identity_region(count: int) -> Callable[[Span], Needs]:
    """Return the receptive field of a row-wise operator with ``count`` inputs.

    It needs the same rows of each input.
    """

    def needed(span: Span) -> Needs:
        return ([span],) * count

    return needed
