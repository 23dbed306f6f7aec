"""Rules of resampling: pooling, interpolation, pixel shuffle and unshuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.conv import kernel_op, size_per_dim, spatial_axis
from lowtide.streaming.rules.rule import (
    InputSpans,
    LoweringContext,
    RowAxis,
    RowKernel,
    RowOp,
    Rule,
    banded_op,
    node_argument,
    op_name,
    replace_arg,
    samplewise_rule,
)
from lowtide.streaming.spans import Span

# Workspace of max pooling: one map between its two passes, or PyTorch's indices of the maxima.
_MAX_POOL_WORKSPACE = 1.0


def lower_pool(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a pooling to a band with its halo; no ``ceil_mode``, no dilation."""
    name = op_name(node.target)
    count, is_max = int(name[len("max_pool")]), name.startswith("max")
    at = spatial_axis(node, context, count)
    if at is None:
        return None
    size = size_per_dim(node_argument(node, 1, "kernel_size"), 1, count)
    step = node_argument(node, 2, "stride")
    stride = size_per_dim(step, 1, count) if step else size
    pad = size_per_dim(node_argument(node, 3, "padding", 0), 0, count)
    dilation = size_per_dim(node_argument(node, 4, "dilation", 1), 1, count) if is_max else (1,)
    ceil = node_argument(node, 5 if is_max else 4, "ceil_mode", False)
    count_include_pad = is_max or node_argument(node, 5, "count_include_pad", True)
    if ceil or set(dilation) != {1} or node_argument(node, 6, "divisor_override"):
        return None
    if not count_include_pad and any(pad):
        return None
    pooled = getattr(F, name)

    def run(piece: Tensor, whole: Sequence[Tensor], rows: int) -> Tensor:
        padding = replace_arg(pad, at, rows)
        if is_max and set(stride) == {1} and piece.device.type == "cpu":
            return max_pool(piece, size, padding)
        return pooled(piece, size, stride, padding)

    fill, scratch = (-math.inf, _MAX_POOL_WORKSPACE) if is_max else (0.0, 0.0)
    kernel = RowKernel(size[at], stride[at], pad[at])
    return kernel_op(node, context, kernel, fill, run, cheap=True, workspace_share=scratch)


def max_pool(image: Tensor, size: Sequence[int], pad: Sequence[int]) -> Tensor:
    """Max pooling with stride 1, along one dim after the other.

    Same values as `torch.nn.functional.max_pool2d`, whose CPU kernel visits each element of each
    window and is ten times slower.

    Args:
        image: Input, (B, C, ...).
        size: Kernel size of each spatial dim.
        pad: Padding of each spatial dim.
    """
    for dim, (extent, frame) in enumerate(zip(size, pad, strict=True), 2):
        image = _max_along(image, dim, extent, frame)
    return image


def _max_along(image: Tensor, dim: int, size: int, pad: int) -> Tensor:
    if pad:
        frame = [0, 0] * (image.dim() - 1 - dim) + [pad, pad]
        image = F.pad(image, frame, value=-math.inf)
    length, seen = image.shape[dim], 1
    while seen < size:  # double the window: the maximum of two that adjoin or overlap
        step = min(seen, size - seen)
        length -= step
        image = torch.maximum(image.narrow(dim, 0, length), image.narrow(dim, step, length))
        seen += step
    return image


def lower_repeat_interleave(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a repeat_interleave by a whole factor along the rows, or along another dim."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    times, rest = divmod(node.meta.shape[rows.dim], rows.size)
    if rest:
        return None
    return _repeated(node, context, rows, times)


def _repeated(node: GraphNode, context: LoweringContext, rows: RowAxis, times: int) -> RowOp:
    """Return an operator that makes ``times`` rows of each."""

    def needed(span: Span) -> InputSpans:
        return ([(span[0] // times, span[1] // times)],)

    found = RowAxis(rows.dim, rows.size * times, times * rows.grain)
    return banded_op(node, context, found, input_spans=needed, cheap=True)


def lower_pixel_shuffle(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a pixel shuffle or unshuffle of (..., C, H, W)."""
    rows, factor = context.row_axis(node.args[0]), node.args[1]
    rank = len(node.meta.shape)
    if rows is None or rows.dim == rank - 3:
        return None
    if rows.dim < rank - 3:
        return banded_op(node, context, rows, cheap=True)
    if op_name(node.target) == "pixel_shuffle":
        return _repeated(node, context, rows, factor)

    def needed(span: Span) -> InputSpans:
        return ([(span[0] * factor, span[1] * factor)],)

    found = RowAxis(rows.dim, rows.size // factor)
    return banded_op(node, context, found, input_spans=needed, cheap=True)


def lower_interpolate(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower an interpolation that scales rows by a whole factor or its inverse.

    Other dims may have any factor; ``align_corners`` is for those only. A halo is computed around
    the band and cropped, so that only the image's real borders are treated as borders.
    """
    rows, before = context.row_axis(node.args[0]), context.meta(node.args[0]).shape[2:]
    at = spatial_axis(node, context, len(before))
    if at is None or rows is None:
        return None
    target = node.target
    assert target is not None
    # Nearest has no align_corners.
    rest = [] if "nearest" in op_name(target) else [node_argument(node, 2, "align_corners")]
    sizes = node.meta.shape[2:]
    # Factors as given: others would round positions differently.
    factors = node_argument(node, 2 + len(rest), "scale_factors") or [
        new / old if new % old == 0 else None for old, new in zip(before, sizes, strict=True)
    ]
    factor = factors[at] or sizes[at] / rows.size
    times, share = max(1, round(factor)), max(1, round(1 / factor))
    if times / share != factor or (any(rest) and factor != 1):
        return None
    # Counted in whole steps of the input, so that positions in the band are those in the image.
    halo = max(0, _HALOS[op_name(target)] - (share > 1)) if factor != 1 else 0
    found = RowAxis(rows.dim, sizes[at], times * rows.grain if share == 1 else 1)

    def around(span: Span) -> Span:
        first, last = max(0, span[0] // times - halo), -(-span[1] // times) + halo
        return first * share, min(rows.size, last * share)

    def needed(span: Span) -> InputSpans:
        return ([around(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = around(span)
        if None in factors:
            given = [*replace_arg(sizes, at, (last - first) * times // share)], *rest, None
        else:
            given = None, *rest, [*replace_arg(tuple(factors), at, times / share)]
        made = target(pieces[0], *given)
        return made.narrow(rows.dim, span[0] - first // share * times, span[1] - span[0])

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")
# Input rows beyond the nearest ones that a result depends on.
_HALOS = {
    **{f"{name}{rank}d": 0 for name in _NEAREST for rank in (1, 2, 3)},
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), 1),
    "upsample_bicubic2d": 2,
}

RULES: dict[str, Rule] = {
    **{
        f"{kind}_pool{count}d": samplewise_rule(lower_pool)
        for kind in ("max", "avg")
        for count in (1, 2, 3)
    },
    "pixel_shuffle": lower_pixel_shuffle,
    "pixel_unshuffle": lower_pixel_shuffle,
    "repeat_interleave": lower_repeat_interleave,
    **dict.fromkeys(_HALOS, samplewise_rule(lower_interpolate)),
}
