"""Rules of upsampling: nearest, bilinear, bicubic, pixel shuffle and unshuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.row_op import InputSpans, RowAxis, RowOp
from lowtide.streaming.rules.rule import Rule, RuleContext, argument, banded_op, op_name
from lowtide.streaming.spans import Span


def repeat_rows(node: Node, context: RuleContext) -> RowOp | None:
    """Lower nearest upsampling by a whole factor, or repeat_interleave."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    times, rest = divmod(node.meta.shape[rows.dim], rows.size)
    if rest:
        return None
    found, needed = (
        RowAxis(rows.dim, rows.size * times, times * rows.grain),
        _upsample_receptive_field(times),
    )
    if op_name(node.target) == "repeat_interleave":
        return banded_op(node, context, found, input_spans=needed, cheap=True)
    if rows.dim != 2 or len(node.meta.shape) != 4:
        return None
    across, factor = node.meta.shape[3] / context.meta(node.args[0]).shape[3], float(times)
    if across != factor:
        return None

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], None, [factor, across]), {}

    plain = replace(node, target=torch.ops.aten.upsample_nearest2d.vec)
    return banded_op(plain, context, found, input_spans=needed, change_args=change, cheap=True)


def _upsample_receptive_field(times: int) -> Callable[[Span], InputSpans]:
    """Return the receptive field of an upsampling by ``times``."""
    return lambda span: ([(span[0] // times, span[1] // times)],)


def _height_axis(node: Node, context: RuleContext) -> RowAxis | None:
    """Return the row axis of an image operator's input if it is dim -2."""
    rows = context.row_axis(node.args[0])
    return rows if rows is not None and rows.dim == len(node.meta.shape) - 2 else None


def pixel_shuffle(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a pixel shuffle."""
    rows, factor = _height_axis(node, context), node.args[1]
    if rows is None:
        return None
    found = RowAxis(rows.dim, rows.size * factor, rows.grain * factor)
    return banded_op(
        node, context, found, input_spans=_upsample_receptive_field(factor), cheap=True
    )


def pixel_unshuffle(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a pixel unshuffle."""
    rows, factor = _height_axis(node, context), node.args[1]
    if rows is None:
        return None

    def needed(span: Span) -> InputSpans:
        return ([(span[0] * factor, span[1] * factor)],)

    return banded_op(
        node, context, RowAxis(rows.dim, rows.size // factor), input_spans=needed, cheap=True
    )


def interpolate(node: Node, context: RuleContext) -> RowOp | None:
    """Lower bilinear or bicubic upsampling by a whole factor, ``align_corners=False``.

    A halo is computed around the band and cropped, so that only the image's real borders are
    treated as borders.
    """
    rows = context.row_axis(node.args[0])
    name = op_name(node.target)
    if rows is None or rows.dim != 2 or argument(node, 2, "align_corners"):
        return None
    before = context.meta(node.args[0]).shape
    times, rest = divmod(node.meta.shape[2], rows.size)
    if rest or node.meta.shape[3] != before[3] * times:
        return None
    halo, mode = {"upsample_bilinear2d": (1, "bilinear"), "upsample_bicubic2d": (2, "bicubic")}[
        name
    ]
    found = RowAxis(2, rows.size * times, times)

    def around(span: Span) -> Span:
        return (
            max(0, span[0] // times - halo),
            min(rows.size, -(-span[1] // times) + halo),
        )

    def needed(span: Span) -> InputSpans:
        return ([around(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        large = F.interpolate(pieces[0], scale_factor=times, mode=mode, align_corners=False)
        return large.narrow(2, span[0] - around(span)[0] * times, span[1] - span[0])

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


RULES: dict[str, Rule] = {
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "repeat_interleave": repeat_rows,
    "upsample_nearest2d": repeat_rows,
    "upsample_bilinear2d": interpolate,
    "upsample_bicubic2d": interpolate,
}
