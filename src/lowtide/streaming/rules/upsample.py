"""Rules of upsampling: interpolation, pixel shuffle and unshuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    found = RowAxis(rows.dim, rows.size * times, times * rows.grain)
    return banded_op(node, context, found, input_spans=_upsample_receptive_field(times), cheap=True)


def _upsample_receptive_field(times: int) -> Callable[[Span], InputSpans]:
    """Return the receptive field of an upsampling by ``times``."""
    return lambda span: ([(span[0] // times, span[1] // times)],)


def _image_axis(node: Node, context: RuleContext) -> RowAxis | None:
    """Return the row axis of an image operator's input if it is the height or the width."""
    rows = context.row_axis(node.args[0])
    return rows if rows is not None and rows.dim >= len(node.meta.shape) - 2 else None


def pixel_shuffle(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a pixel shuffle."""
    rows, factor = _image_axis(node, context), node.args[1]
    if rows is None:
        return None
    found = RowAxis(rows.dim, rows.size * factor, rows.grain * factor)
    return banded_op(
        node, context, found, input_spans=_upsample_receptive_field(factor), cheap=True
    )


def pixel_unshuffle(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a pixel unshuffle."""
    rows, factor = _image_axis(node, context), node.args[1]
    if rows is None:
        return None

    def needed(span: Span) -> InputSpans:
        return ([(span[0] * factor, span[1] * factor)],)

    return banded_op(
        node, context, RowAxis(rows.dim, rows.size // factor), input_spans=needed, cheap=True
    )


def interpolate(node: Node, context: RuleContext) -> RowOp | None:
    """Lower an interpolation that upsamples rows by a whole factor, ``align_corners=False``.

    Other dims may have any factor. A halo is computed around the band and cropped, so that only
    the image's real borders are treated as borders.
    """
    rows, before = context.row_axis(node.args[0]), context.meta(node.args[0]).shape[2:]
    at = spatial_axis(node, context, len(before))
    if at is None or rows is None:
        return None
    target = node.target
    assert target is not None
    # Nearest has no align_corners.
    rest = [] if "nearest" in op_name(target) else [argument(node, 2, "align_corners")]
    times, left = divmod(node.meta.shape[rows.dim], rows.size)
    if left or (any(rest) and times > 1):
        return None
    halo = _HALOS[op_name(target)] if times > 1 else 0
    sizes = node.meta.shape[2:]
    # Factors as given: others would round positions differently.
    factors = argument(node, 2 + len(rest), "scale_factors") or [
        new / old if new % old == 0 else None for old, new in zip(before, sizes, strict=True)
    ]
    found = RowAxis(rows.dim, rows.size * times, times * rows.grain)

    def around(span: Span) -> Span:
        return (
            max(0, span[0] // times - halo),
            min(rows.size, -(-span[1] // times) + halo),
        )

    def needed(span: Span) -> InputSpans:
        return ([around(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = around(span)
        if None in factors:
            given = [*replace_arg(sizes, at, (last - first) * times)], *rest, None
        else:
            given = None, *rest, [*replace_arg(tuple(factors), at, float(times))]
        large = target(pieces[0], *given)
        return large.narrow(rows.dim, span[0] - first * times, span[1] - span[0])

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


# Input rows beyond the nearest ones that a result depends on.
_HALOS = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), 0),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), 1),
    "upsample_bicubic2d": 2,
}

RULES: dict[str, Rule] = {
    "pixel_shuffle": samplewise(pixel_shuffle),
    "pixel_unshuffle": samplewise(pixel_unshuffle),
    "repeat_interleave": repeat_rows,
    **dict.fromkeys(_HALOS, samplewise(interpolate)),
}
