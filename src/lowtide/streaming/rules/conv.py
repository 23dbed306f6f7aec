"""Rules of convolution, transposed convolution and unfold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.memory_format import to_contiguous
from lowtide.streaming.capture.graph import Node
from lowtide.streaming.pages.page import concat_rows
from lowtide.streaming.rules.kernel_extent import Kernel
from lowtide.streaming.rules.light_conv import light_convolution
from lowtide.streaming.rules.row_op import InputSpans, RowAxis, RowOp
from lowtide.streaming.rules.rule import Rule, RuleContext, argument
from lowtide.streaming.rules.sum_layout import needs_contiguous_input
from lowtide.streaming.spans import Span

# oneDNN copies a convolution's input or result, and its weights, to blocks of 16 channels: share of
# input and result that these copies take.
ONEDNN_REORDER_SHARE, _CHANNEL_BLOCK = 0.6, 16


def pair(value: Any, default: int) -> tuple[int, int]:
    """Return a size, one value or two, as (height, width); ``default`` if absent."""
    if value is None or value == []:
        return default, default
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


def non_image_inputs(node: Node, context: RuleContext) -> tuple[int, ...] | None:
    """Return the arguments of an image operator but its image; None if one has rows."""
    full_inputs = tuple(one for one in node.refs if one != node.args[0].node)
    return None if any(one in context.rows for one in full_inputs) else full_inputs


def kernel_op(
    node: Node,
    context: RuleContext,
    kernel: Kernel,
    pad_value: float,
    run: Any,
    *,
    dim: int = 2,
    cheap: bool = False,
    workspace_share: float = 0.0,
    fixed_workspace_bytes: int = 0,
) -> RowOp | None:
    """Lower an operator with a kernel: a band with its halo, padded at the borders.

    Args:
        node: Node to lower; its first argument is the image.
        context: Graph and row axes.
        kernel: Receptive field along the rows.
        pad_value: Value of the padding.
        run: Computes (input rows, wholes, padding of rows); the padding is 0 for a band.
        dim: Dim of the rows.
        cheap: As in `RowOp`.
        workspace_share: As in `RowOp`.
        fixed_workspace_bytes: As in `RowOp`.

    Returns:
        The operator, or None if rows are not along ``dim`` or other arguments have rows.
    """
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim != dim:
        return None
    found = RowAxis(dim, node.meta.shape[dim])

    def needed(span: Span) -> InputSpans:
        first, last = kernel.receptive_field(span)
        return ([(max(0, first), min(rows.size, last))],)

    def band(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = kernel.receptive_field(span)
        above, below = max(0, -first), max(0, last - rows.size)
        piece = pieces[0]
        if above == below == kernel.pad and first + above == 0:
            return run(piece, whole, kernel.pad)  # the whole image
        if above or below:
            piece = pad_constant(piece, dim, above, below, pad_value)
        return run(piece, whole, 0)

    full_inputs = non_image_inputs(node, context)
    if full_inputs is None:
        return None
    return RowOp(
        found,
        (node.args[0].node,),
        full_inputs,
        needed,
        band,
        cheap,
        workspace_share=workspace_share,
        fixed_workspace_bytes=fixed_workspace_bytes,
        padded=kernel.pad > 0,
    )


def pad_constant(rows: Tensor, dim: int, above: int, below: int, value: float) -> Tensor:
    """Pad rows along ``dim`` with a constant, in one write; `F.pad` writes them twice.

    Args:
        rows: Rows to pad.
        dim: Dim of the rows.
        above: Rows to add before.
        below: Rows to add after.
        value: Value of the padding.
    """
    shape = list(rows.shape)
    pieces = [rows]
    for count, place in ((above, 0), (below, 2)):
        if count:
            shape[dim] = count
            pieces.insert(place, rows.new_full(shape, value))
    return concat_rows(pieces, dim, like=rows)


def pad_at_borders(rows: Tensor, span: Span, size: int, columns: int) -> Tensor:
    """Zero-pad a band at the image's ends, and by ``columns`` columns left and right.

    ``span`` are its rows, unclipped, in an image of ``size`` rows.
    """
    frame = [columns, columns, max(0, -span[0]), max(0, span[1] - size)]
    return F.pad(rows, frame) if any(frame) else rows


def convolution(node: Node, context: RuleContext) -> RowOp | None:
    """Lower conv2d with zero padding.

    Bands at the image's ends and inside run the same operator. Padding of rows that would only be
    cropped is left out.
    """
    weight, bias = node.args[1], argument(node, 2, "bias")
    if len(node.meta.shape) != 4:
        return None
    stride, dilation = (
        pair(argument(node, place, name), 1) for place, name in ((3, "stride"), (5, "dilation"))
    )
    given = argument(node, 4, "padding", 0)
    groups = argument(node, 6, "groups", 1)
    size = context.meta(weight).shape[2]
    extent = (size - 1) * dilation[0] + 1
    if given == "same" and stride == (1, 1):
        width = (context.meta(weight).shape[3] - 1) * dilation[1]
        if (extent - 1) % 2 or width % 2:
            return None
        pad = (extent - 1) // 2, width // 2
    elif isinstance(given, str):
        pad = 0, 0
        if given != "valid":
            return None
    else:
        pad = pair(given, 0)
    has_bias = bias is not None

    make_contiguous = needs_contiguous_input(node.args[0], context)

    def run(piece: Tensor, whole: Sequence[Tensor], rows: int) -> Tensor:
        piece = to_contiguous(piece) if make_contiguous else piece
        return F.conv2d(
            piece,
            whole[0],
            whole[1] if has_bias else None,
            stride,
            (rows, pad[1]),
            dilation,
            groups,
        )

    kernel = Kernel(extent, stride[0], pad[0])
    channels = context.meta(node.args[0]).shape[1], node.meta.shape[1]
    step = kernel_op(
        node,
        context,
        kernel,
        0.0,
        run,
        workspace_share=ONEDNN_REORDER_SHARE
        * max(-(-count // _CHANNEL_BLOCK) * _CHANNEL_BLOCK / count for count in channels),
        fixed_workspace_bytes=context.meta(weight).nbytes,
    )
    return None if step is None else light_convolution(step, node, context, kernel, run)


def unfold(node: Node, context: RuleContext) -> RowOp | None:
    """Lower unfold (im2col) of (B, C, H, W); one row of windows is a grain."""
    rows = context.row_axis(node.args[0])
    image = context.meta(node.args[0]).shape
    if rows is None or rows.dim != 2 or len(image) != 4:
        return None
    size, dilation, pad, stride = (pair(node.args[place], 1) for place in range(1, 5))
    extent = (size[0] - 1) * dilation[0] + 1
    windows_per_row = (image[3] + 2 * pad[1] - (size[1] - 1) * dilation[1] - 1) // stride[1] + 1
    found = RowAxis(2, node.meta.shape[2], windows_per_row)
    kernel = Kernel(extent, stride[0], pad[0])

    def windows(span: Span) -> Span:
        return kernel.receptive_field((span[0] // windows_per_row, span[1] // windows_per_row))

    def needed(span: Span) -> InputSpans:
        first, last = windows(span)
        return ([(max(0, first), min(rows.size, last))],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        piece = pad_at_borders(pieces[0], windows(span), rows.size, pad[1])
        return F.unfold(piece, size, dilation, 0, stride)

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


def transposed_convolution(node: Node, context: RuleContext) -> RowOp | None:
    """Lower conv_transpose2d: a band from the few input rows that contribute to it."""
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim != 2 or len(node.meta.shape) != 4:
        return None
    stride, pad, output_padding = (
        pair(argument(node, place, name), default)
        for place, name, default in (
            (3, "stride", 1),
            (4, "padding", 0),
            (5, "output_padding", 0),
        )
    )
    groups = argument(node, 6, "groups", 1)
    dilation = pair(argument(node, 7, "dilation"), 1)
    size = context.meta(node.args[1]).shape[2]
    extent = (size - 1) * dilation[0]
    has_bias = argument(node, 2, "bias") is not None
    found = RowAxis(2, node.meta.shape[2])

    def sources(span: Span) -> Span:
        first = -(-(span[0] + pad[0] - extent) // stride[0])
        last = (span[1] - 1 + pad[0]) // stride[0] + 1
        return max(0, first), min(rows.size, last)

    def needed(span: Span) -> InputSpans:
        return ([sources(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        # all rows that the input rows contribute to; row 0 belongs to the first input row
        full = torch.conv_transpose2d(
            pieces[0],
            whole[0],
            whole[1] if has_bias else None,
            stride,
            (0, pad[1]),
            (0, output_padding[1]),
            groups,
            dilation,
        )
        start = span[0] + pad[0] - sources(span)[0] * stride[0]
        short_of = start + span[1] - span[0] - full.shape[2]
        if short_of > 0:  # rows of output_padding, which no input row contributes to
            bias = whole[1].view(1, -1, 1, 1) if has_bias else full.new_zeros(())
            shape = *full.shape[:2], short_of, full.shape[3]
            full = torch.cat([full, bias.expand(shape)], 2)
        return full.narrow(2, start, span[1] - span[0])

    full_inputs = non_image_inputs(node, context)
    if full_inputs is None:
        return None
    return RowOp(found, (node.args[0].node,), full_inputs, needed, run)


RULES: dict[str, Rule] = {
    "conv2d": convolution,
    "im2col": unfold,
    "conv_transpose2d": transposed_convolution,
}
