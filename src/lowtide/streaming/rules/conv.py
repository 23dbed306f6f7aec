"""Rules of convolution and transposed convolution in 1D, 2D and 3D, and of unfold.

Frames (B, C, T, H, W) run on a CPU as one 2D convolution per frame. For bands of few rows oneDNN
has no fast 3D kernel: it copies each window, which takes up to 27 times the input, and reaches a
third of the speed of the same products as 2D convolution. There, the frames that a result frame
depends on are channels: (B, C, T, H, W) is (B, C·T, H, W) as it lies in memory, and so are the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.pages.page import concat_rows
from lowtide.streaming.rules.rule import (
    InputSpans,
    LoweringContext,
    RowAxis,
    RowKernel,
    RowOp,
    Rule,
    node_argument,
    replace_arg,
    samplewise_rule,
)
from lowtide.streaming.spans import Span

# oneDNN copies a convolution's input or result, and its weights, to blocks of 16 channels: share of
# input and result that these copies take.
ONEDNN_REORDER_SHARE, _CHANNEL_BLOCK = 0.6, 16


def size_per_dim(value: Any, default: int, count: int = 2) -> tuple[int, ...]:
    """Return a size, one value or one per spatial dim, as ``count`` values.

    It is ``default`` if absent.
    """
    if value is None or value == []:
        value = default
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) if len(value) == count else (value[0],) * count


def spatial_axis(node: GraphNode, context: LoweringContext, count: int) -> int | None:
    """Return the place of the rows among ``count`` spatial dims of (B, C, ...).

    None if they are not there, or if the batch is missing.
    """
    rows = context.row_axis(node.args[0])
    batched = len(node.meta.shape) == count + 2
    return rows.dim - 2 if rows is not None and rows.dim >= 2 and batched else None


def non_image_inputs(node: GraphNode, context: LoweringContext) -> tuple[int, ...] | None:
    """Return the arguments of an image operator but its image; None if one has rows."""
    full_inputs = tuple(one for one in node.refs if one != node.args[0].node)
    return None if any(one in context.rows for one in full_inputs) else full_inputs


def kernel_op(
    node: GraphNode,
    context: LoweringContext,
    kernel: RowKernel,
    pad_value: float,
    run: Any,
    *,
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
        cheap: As in `RowOp`.
        workspace_share: As in `RowOp`.
        fixed_workspace_bytes: As in `RowOp`.

    Returns:
        The operator, or None if other arguments have rows.
    """
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    dim = rows.dim
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
        rows: Rows to pad, such as (B, C, rows, W).
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
    """Zero-pad a band (B, C, rows, W) at the image's ends, and ``columns`` on each side.

    ``span`` are its rows, unclipped, in an image of ``size`` rows.
    """
    frame = [columns, columns, max(0, -span[0]), max(0, span[1] - size)]
    return F.pad(rows, frame) if any(frame) else rows


def lower_convolution(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a convolution with zero padding, (B, C, ...).

    Bands at the image's ends and inside run the same operator. Padding of rows that would only be
    cropped is left out.
    """
    weight, bias = node.args[1], node_argument(node, 2, "bias")
    sizes = context.meta(weight).shape[2:]
    at = spatial_axis(node, context, len(sizes))
    if at is None:
        return None
    stride, dilation = (
        size_per_dim(node_argument(node, place, name), 1, len(sizes))
        for place, name in ((3, "stride"), (5, "dilation"))
    )
    given = node_argument(node, 4, "padding", 0)
    groups = node_argument(node, 6, "groups", 1)
    reach = [(size - 1) * step for size, step in zip(sizes, dilation, strict=True)]
    if isinstance(given, str):
        if given != "valid" and (set(stride) != {1} or any(one % 2 for one in reach)):
            return None
        given = 0 if given == "valid" else [one // 2 for one in reach]
    pad = size_per_dim(given, 0, len(sizes))
    has_bias = bias is not None

    by_frame = runs_by_frame(node, context, at)

    def run(piece: Tensor, whole: Sequence[Tensor], rows: int) -> Tensor:
        if by_frame:
            pads = replace_arg(pad, at, rows)
            return convolve_frames(
                piece, whole[0], whole[1] if has_bias else None, stride, pads, dilation
            )
        return getattr(F, f"conv{len(sizes)}d")(
            piece,
            whole[0],
            whole[1] if has_bias else None,
            stride,
            replace_arg(pad, at, rows),
            dilation,
            groups,
        )

    kernel = RowKernel(reach[at] + 1, stride[at], pad[at])
    channels = context.meta(node.args[0]).shape[1], node.meta.shape[1]
    share = ONEDNN_REORDER_SHARE * max(
        -(-count // _CHANNEL_BLOCK) * _CHANNEL_BLOCK / count for count in channels
    )
    if by_frame:
        share = (1 + share) / node.meta.shape[2]  # and the frames that a frame depends on
    return kernel_op(
        node,
        context,
        kernel,
        0.0,
        run,
        workspace_share=share,
        fixed_workspace_bytes=context.meta(weight).nbytes,
    )


def lower_unfold(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower unfold (im2col) of (B, C, H, W); one row of windows is a grain."""
    rows = context.row_axis(node.args[0])
    image = context.meta(node.args[0]).shape
    if rows is None or rows.dim != 2 or len(image) != 4:
        return None
    size, dilation, pad, stride = (size_per_dim(node.args[place], 1) for place in range(1, 5))
    extent = (size[0] - 1) * dilation[0] + 1
    windows_per_row = (image[3] + 2 * pad[1] - (size[1] - 1) * dilation[1] - 1) // stride[1] + 1
    found = RowAxis(2, node.meta.shape[2], windows_per_row)
    kernel = RowKernel(extent, stride[0], pad[0])

    def windows(span: Span) -> Span:
        return kernel.receptive_field((span[0] // windows_per_row, span[1] // windows_per_row))

    def needed(span: Span) -> InputSpans:
        first, last = windows(span)
        return ([(max(0, first), min(rows.size, last))],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        piece = pad_at_borders(pieces[0], windows(span), rows.size, pad[1])
        return F.unfold(piece, size, dilation, 0, stride)

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


def lower_transposed_convolution(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a transposed convolution: a band from the few input rows that contribute to it."""
    sizes = context.meta(node.args[1]).shape[2:]
    rows, at = context.row_axis(node.args[0]), spatial_axis(node, context, len(sizes))
    full_inputs = non_image_inputs(node, context)
    if rows is None or at is None or full_inputs is None:
        return None
    stride, pad, output_padding, dilation = (
        size_per_dim(node_argument(node, place, name), default, len(sizes))
        for place, name, default in (
            (3, "stride", 1),
            (4, "padding", 0),
            (5, "output_padding", 0),
            (7, "dilation", 1),
        )
    )
    groups = node_argument(node, 6, "groups", 1)
    extent = (sizes[at] - 1) * dilation[at]
    has_bias = node_argument(node, 2, "bias") is not None
    found, run_transposed = RowAxis(rows.dim, node.meta.shape[rows.dim]), _transposed(len(sizes))

    def sources(span: Span) -> Span:
        first = -(-(span[0] + pad[at] - extent) // stride[at])
        last = (span[1] - 1 + pad[at]) // stride[at] + 1
        return max(0, first), min(rows.size, last)

    def needed(span: Span) -> InputSpans:
        return ([sources(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        # all rows that the input rows contribute to; row 0 belongs to the first input row
        full = run_transposed(
            pieces[0],
            whole[0],
            whole[1] if has_bias else None,
            stride,
            replace_arg(pad, at, 0),
            replace_arg(output_padding, at, 0),
            groups,
            dilation,
        )
        start = span[0] + pad[at] - sources(span)[0] * stride[at]
        short_of = start + span[1] - span[0] - full.shape[rows.dim]
        if short_of > 0:  # rows of output_padding, which no input row contributes to
            bias = whole[1] if has_bias else full.new_zeros(1)
            shape = replace_arg(full.shape, rows.dim, short_of)
            bias = bias.view(1, -1, *([1] * len(sizes)))
            full = torch.cat([full, bias.expand(shape)], rows.dim)
        return full.narrow(rows.dim, start, span[1] - span[0])

    return RowOp(found, (node.args[0].node,), full_inputs, needed, run)


def _transposed(count: int) -> Any:
    return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), samplewise_rule(lower_convolution)),
    "im2col": samplewise_rule(lower_unfold),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        samplewise_rule(lower_transposed_convolution),
    ),
}


# In 16 bits the 3D kernels are as fast.
_DTYPES = (torch.float32, torch.float64)


def runs_by_frame(node: GraphNode, context: LoweringContext, axis: int) -> bool:
    """Return whether a convolution of volumes should run frame by frame.

    ``axis`` is the place of the rows among its three spatial dims, of which the first is time.
    """
    weight = context.meta(node.args[1])
    return (
        context.graph.on_cpu
        and axis != 0
        and len(weight.shape) == 5
        and weight.dtype in _DTYPES
        and math.prod(weight.shape[2:]) > 1  # else oneDNN runs it as a matrix product
        and node_argument(node, 6, "groups", 1) == 1
    )


def convolve_frames(
    clip: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return what `F.conv3d` returns for a clip (B, C, T, H, W), to rounding.

    Args:
        clip: Frames, of any strides.
        weight: Weights (C', C, T, H, W), contiguous.
        bias: Bias (C',), or None.
        stride: Strides in time and space.
        padding: Zeros at both ends in time and space.
        dilation: Dilations in time and space.
    """
    if padding[0]:
        clip = F.pad(clip, (0, 0, 0, 0, padding[0], padding[0]))
    taps, step = weight.shape[2], dilation[0]
    reach = (taps - 1) * step + 1
    count = (clip.shape[2] - reach) // stride[0] + 1
    flat = weight.flatten(1, 2)
    result = None
    for place in range(count):
        seen = clip[:, :, place * stride[0] : place * stride[0] + reach : step].flatten(1, 2)
        frame = F.conv2d(seen, flat, bias, stride[1:], padding[1:], dilation[1:])
        del seen  # a copy, if there is more than one frame
        if count == 1:
            return frame.unsqueeze(2)
        if result is None:
            result = frame.new_empty(*frame.shape[:2], count, *frame.shape[2:])
        result[:, :, place] = frame
    assert result is not None
    return result
