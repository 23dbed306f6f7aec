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
InputSpans = tuple[Spans, ...]
# (span, input rows, arguments without rows) -> result rows. Arguments are tensors or lists of
# `MaskPattern`.
Run = Callable[[Span, Sequence[Tensor], Sequence[Any]], Tensor]


def _zero(_: int) -> int:
    return 0


@dataclass(frozen=True)
class RowOp:
    """Operator on a band of rows.

    Attributes:
        rows: Row axis of the result.
        inputs: Nodes with rows.
        full_inputs: Nodes without rows.
        input_spans: Returns the rows of each input that a span of the result needs.
        run: Computes a span from these rows and the full inputs.
        cheap: Recomputing the result takes less time than keeping it.
        view: The result shares the memory of the first input.
        sliced_dims: Full inputs that are sliced to the span, with the dim of each.
        pattern_dims: Constants among them that are passed as `MaskPattern`s of the span, with the
            dim of each.
        workspace_share: Workspace as a share of the bytes of its inputs and result.
        row_workspace_bytes: Workspace bytes for a number of rows.
        fixed_workspace_bytes: Workspace bytes of any band.
        padded: Bands at the image's ends are copied to pad them.
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    full_inputs: tuple[int, ...]
    input_spans: Callable[[Span], InputSpans]
    run: Run
    cheap: bool = False
    view: bool = False
    sliced_dims: Mapping[int, int] = field(default_factory=dict)
    pattern_dims: Mapping[int, int] = field(default_factory=dict)
    workspace_share: float = 0.0
    row_workspace_bytes: Callable[[int], int] = _zero
    fixed_workspace_bytes: int = 0
    padded: bool = False

    def workspace_bytes(self, num_rows: int, input_bytes: int, output_bytes: int) -> int:
        """Estimate the workspace bytes of a band.

        Args:
            num_rows: Rows of the result.
            input_bytes: Bytes of the input rows.
            output_bytes: Bytes of the result rows.
        """
        share = int(self.workspace_share * (input_bytes + output_bytes))
        return share + self.row_workspace_bytes(num_rows) + self.fixed_workspace_bytes


@dataclass(frozen=True)
class Reduction:
    """Reduction over all rows, accumulated band by band.

    Attributes:
        rows: Row axis of the inputs.
        inputs: Nodes with equally many rows.
        add: Returns the state, None at first, updated with the rows of a span, such as (B, C, rows,
            W).
        finish: Returns the result for a state, a tensor without rows, such as (B, C, 1, 1).
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    add: Callable[[Any, Sequence[Tensor]], Any]
    finish: Callable[[Any], Tensor]


def identity_receptive_field(count: int) -> Callable[[Span], InputSpans]:
    """Return the receptive field of a row-wise operator with ``count`` inputs.

    It needs the same rows of each input.
    """

    def needed(span: Span) -> InputSpans:
        return ([span],) * count

    return needed
