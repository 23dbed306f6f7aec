"""Rules of upsampling: interpolation, pixel shuffle and unshuffle."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.conv import spatial_axis
from lowtide.streaming.rules.row_op import InputSpans, RowAxis, RowOp
from lowtide.streaming.rules.rule import (
    Rule,
    RuleContext,
    argument,
    banded_op,
    op_name,
    replace_arg,
    samplewise,
)
from lowtide.streaming.spans import Span


def repeat_rows(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a repeat_interleave by a whole factor along the rows, or along another dim."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    times, rest = divmod(node.meta.shape[rows.dim], rows.size)
    if rest:
        return None
    return _repeated(node, context, rows, times)


def _repeated(node: Node, context: RuleContext, rows: RowAxis, times: int) -> RowOp:
    """Return an operator that makes ``times`` rows of each."""

    def needed(span: Span) -> InputSpans:
        return ([(span[0] // times, span[1] // times)],)

    found = RowAxis(rows.dim, rows.size * times, times * rows.grain)
    return banded_op(node, context, found, input_spans=needed, cheap=True)


def pixel_shuffle(node: Node, context: RuleContext) -> RowOp | None:
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


def interpolate(node: Node, context: RuleContext) -> RowOp | None:
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
    rest = [] if "nearest" in op_name(target) else [argument(node, 2, "align_corners")]
    sizes = node.meta.shape[2:]
    # Factors as given: others would round positions differently.
    factors = argument(node, 2 + len(rest), "scale_factors") or [
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
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_shuffle,
    "repeat_interleave": repeat_rows,
    **dict.fromkeys(_HALOS, samplewise(interpolate)),
}
