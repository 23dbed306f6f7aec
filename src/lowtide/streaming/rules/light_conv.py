"""Convolutions so light that copying their rows first would take as long as they do.

A band at one end of the image has zeros on one side alone, which no kernel adds. To frame it is a
copy, that a card reads and writes as long as what a light convolution is for. Here it is convolved
with zeros on both sides, and rows of the result that look at the others are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.kernel_extent import Kernel
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import RuleContext, op_name
from lowtide.streaming.spans import Span

# What takes a part of a tensor as it does a whole one: others would copy it.
TAKE_PARTS = {"prelu", "pixel_shuffle"}


def light_convolution(
    step: RowOp,
    node: Node,
    tracked: RuleContext,
    kernel: Kernel,
    run: Callable[[Tensor, Sequence[Tensor], int], Tensor],
) -> RowOp:
    """``step`` without frames on a card, where it is light; ``run`` convolves rows with so many
    zeros above and below."""
    readers, overlap = tracked.readers.get(node.index, []), kernel.reach - 1
    if (
        tracked.graph.on_cpu
        or kernel.stride != 1
        or overlap == 0
        or not readers
        or tracked.users[node.args[0].node] != 1
        or not all(op_name(one.target) in TAKE_PARTS for one in readers)
    ):
        return step
    size = tracked.rows[node.args[0].node].size

    def band(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = kernel.seen(span)
        if (first < 0) == (last > size):
            return step.run(span, pieces, whole)
        made = run(pieces[0], whole, overlap)
        # Where the result's row 0 would be among these.
        at = span[0] + overlap - kernel.pad - max(0, first)
        return made.narrow(2, at, span[1] - span[0])

    return replace(step, run=band, overlap=overlap, framed=False)
