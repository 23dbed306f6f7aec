"""Convolutions of bands whose rows lie in two pieces: some held from the band before, and new ones.

To put both together first takes a copy of all of them, which a card reads and writes as long as
what a light convolution is for. Here the new rows are convolved with
zeros around them, and the few rows of the result that look across the seam are made of a small
piece and put in their place. Rows at an image's end get their zeros in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.rows import RowOp, Run
from lowtide.streaming.bands.rules.kernel import Kernel
from lowtide.streaming.bands.rules.rule import Tracked, short
from lowtide.streaming.bands.spans import Span

# What takes a part of a tensor as it does a whole one: others would copy it, or could not put
# their result into its memory.
_TAKE_PARTS = {"prelu", "batch_norm", "pixel_shuffle"}
# New rows for each row that two bands see, below which a copy is less than what is made twice.
LEAST = 4


def seamed(
    step: RowOp, node: Node, tracked: Tracked, kernel: Kernel,
    run: Callable[[Tensor, Sequence[Tensor], int], Tensor],
) -> RowOp:  # fmt: skip
    """``step`` with a form for rows in two pieces, where that pays; ``run`` convolves rows with so
    many zeros above and below."""
    readers, held = tracked.readers.get(node.index, []), kernel.reach - 1
    if (
        tracked.graph.on_cpu or kernel.stride != 1 or held == 0 or not readers
        or tracked.users[node.args[0].node] != 1
        or not all(short(one.target) in _TAKE_PARTS for one in readers)
    ):  # fmt: skip
        return step
    size = tracked.rows[node.args[0].node].size

    def apart(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, new = max(0, kernel.seen(span)[0]), pieces[-1]
        if len(pieces) > 1:
            first += pieces[0].shape[2]
        made = run(new, whole, held)
        # Where the result's row 0 would be among these.
        at = span[0] + held - kernel.pad - first
        rows = made.narrow(2, at, span[1] - span[0])
        if len(pieces) > 1:
            across = run(torch.cat([pieces[0], new.narrow(2, 0, held)], 2), whole, 0)
            rows.narrow(2, 0, across.shape[2]).copy_(across)
        return rows

    return replace(step, run=_in_one_piece(step.run, apart, kernel, size), apart=apart,
                   framed=False)  # fmt: skip


def _in_one_piece(run: Run, apart: Run, kernel: Kernel, size: int) -> Run:
    def band(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = kernel.seen(span)
        at_one_end = (first < 0) != (last > size)
        return (apart if at_one_end else run)(span, pieces, whole)

    return band
