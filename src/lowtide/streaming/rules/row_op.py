"""How a tensor carries the rows of an image, and what an operator does to bands of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowtide.streaming.spans import Span, Spans


@dataclass(frozen=True)
class RowAxis:
    """Dimension ``dim`` of a tensor runs down the image, ``size`` long.

    A band of it begins and ends at multiples of ``grain``: where windows of several rows and
    columns lie one after another, those of one row of windows are a grain.
    """

    dim: int
    size: int
    grain: int = 1


# Rows of each of the tensors with rows that a band depends on, in the order they are taken in.
Needs = tuple[Spans, ...]
# Rows of a span, of those of the inputs and of what has none: tensors, or lists of patterns.
Run = Callable[[Span, Sequence[Tensor], Sequence[Any]], Tensor]
# The same, and the tensor that the rows are put into.
Into = Callable[[Span, Sequence[Tensor], Sequence[Any], Tensor], object]


def _nothing(_: int) -> int:
    return 0


@dataclass(frozen=True)
class RowOp:
    """One operator on a band.

    ``inputs`` are nodes with rows, ``wholes`` nodes without. ``needed`` tells the inputs' rows for
    a span of the result's; ``run`` makes the span's rows of those and the whole tensors. Of the
    wholes in ``sliced`` only the span is given, along the dimension named there, of those in
    ``patterned`` the patterns of the span (of fixed results only). ``scratch`` is what the operator
    takes while it runs, as a share of its inputs and result, ``scratch_of`` for so many rows, and
    ``scratch_bytes`` whatever the band; ``framed`` says that bands at the image's ends are copied
    with a frame. ``cheap`` operators take less time than their results take to be kept; a ``view``
    has the memory of its first input. ``over`` has by input a form of ``run`` that may put the
    result into that input's memory, ``into`` is a form that puts it into memory that it is given.
    Of a light one a card makes a few rows twice sooner than it puts held ones beside new ones:
    ``overlap`` is how many rows its result's neighboring ones see together, 0 of all others.
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
        """Bytes that it takes while it makes so many rows, roughly, of so many given and for such
        a result."""
        share = int(self.scratch * (given + result))
        return share + self.scratch_of(rows) + self.scratch_bytes


@dataclass(frozen=True)
class Reduction:
    """What all rows are reduced to, gathered band by band.

    ``add`` returns the state (None at first) with the rows of a span; ``finish`` makes the
    result of it, a tensor without rows. ``inputs`` have equally many rows.
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    add: Callable[[Any, Sequence[Tensor]], Any]
    finish: Callable[[Any], Tensor]


def identity_region(count: int) -> Callable[[Span], Needs]:
    """Needs of an operator whose rows depend on the same rows of each of its inputs."""

    def needed(span: Span) -> Needs:
        return ([span],) * count

    return needed
