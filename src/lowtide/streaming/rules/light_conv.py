"""Light convolutions without a padding copy, for a GPU.

A band at one end of the image has zeros on one side only, which no kernel can add. Padding copies
the band, and a GPU takes as long for it as for a light convolution. Here both sides are padded by
the convolution itself, and result rows that depend on the wrong zeros are cropped.
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

# Operators that read a non-contiguous slice without a copy.
_STRIDED_INPUT_OPS = {"prelu", "pixel_shuffle"}


def light_convolution(
    step: RowOp,
    node: Node,
    context: RuleContext,
    kernel: Kernel,
    run: Callable[[Tensor, Sequence[Tensor], int], Tensor],
) -> RowOp:
    """Return ``step`` without padding copies on a GPU where it is light.

    Args:
        step: Convolution as lowered.
        node: Its node.
        context: Graph and row axes.
        kernel: Receptive field along the rows.
        run: Convolves (input rows, such as (B, C, rows, W); whole inputs; padding above and below).
    """
    readers, overlap = context.readers.get(node.index, []), kernel.extent - 1
    if (
        context.graph.on_cpu
        or kernel.stride != 1
        or overlap == 0
        or not readers
        or context.use_counts[node.args[0].node] != 1
        or not all(op_name(one.target) in _STRIDED_INPUT_OPS for one in readers)
    ):
        return step
    size = context.rows[node.args[0].node].size

    def band(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = kernel.receptive_field(span)
        if (first < 0) == (last > size):
            return step.run(span, pieces, whole)
        made = run(pieces[0], whole, overlap)
        # offset of the span within the padded result
        at = span[0] + overlap - kernel.pad - max(0, first)
        return made.narrow(step.rows.dim, at, span[1] - span[0])

    return replace(step, run=band, padded=False)
