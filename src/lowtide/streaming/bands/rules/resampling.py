"""Operators that make more rows or fewer: enlargement, repetition, shuffles of pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.rows import Needs, RowOp, Rows
from lowtide.streaming.bands.rules.rule import Rule, Tracked, argument, mapped, short
from lowtide.streaming.bands.spans import Span


def enlarged(node: Node, tracked: Tracked) -> RowOp | None:
    """Each row several times: nearest upsampling, and repeated places."""
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    times, rest = divmod(node.like.shape[rows.dim], rows.size)
    if rest:
        return None
    found, needed = Rows(rows.dim, rows.size * times, times * rows.grain), _fewer(times)
    if short(node.target) == "repeat_interleave":
        return mapped(node, tracked, found, needed=needed, cheap=True)
    if rows.dim != 2 or len(node.like.shape) != 4:
        return None
    across, factor = node.like.shape[3] / tracked.like(node.args[0]).shape[3], float(times)
    if across != factor:
        return None

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], None, [factor, across]), {}

    plain = replace(node, target=torch.ops.aten.upsample_nearest2d.vec)
    return mapped(plain, tracked, found, needed=needed, change=change, cheap=True)


def _fewer(times: int) -> Callable[[Span], Needs]:
    """The rows that a span comes from, each of which makes so many."""
    return lambda span: ([(span[0] // times, span[1] // times)],)


def _height(node: Node, tracked: Tracked) -> Rows | None:
    """The rows of an operator's image, if they are its height."""
    rows = tracked.of(node.args[0])
    return rows if rows is not None and rows.dim == len(node.like.shape) - 2 else None


def shuffled(node: Node, tracked: Tracked) -> RowOp | None:
    """Channels to pixels (pixel shuffle)."""
    rows, factor = _height(node, tracked), node.args[1]
    if rows is None:
        return None
    found = Rows(rows.dim, rows.size * factor, rows.grain * factor)
    return mapped(node, tracked, found, needed=_fewer(factor), cheap=True)


def unshuffled(node: Node, tracked: Tracked) -> RowOp | None:
    """Pixels to channels (pixel unshuffle)."""
    rows, factor = _height(node, tracked), node.args[1]
    if rows is None:
        return None

    def needed(span: Span) -> Needs:
        return ([(span[0] * factor, span[1] * factor)],)

    return mapped(node, tracked, Rows(rows.dim, rows.size // factor), needed=needed, cheap=True)


def resampled(node: Node, tracked: Tracked) -> RowOp | None:
    """Bilinear and bicubic enlargement by a whole factor, by pixels' centers.

    Rows beyond a band's own are computed too and cut off, so that only the image's real ends
    are ends.
    """
    rows = tracked.of(node.args[0])
    name = short(node.target)
    if rows is None or rows.dim != 2 or argument(node, 2, "align_corners"):
        return None
    before = tracked.like(node.args[0]).shape
    times, rest = divmod(node.like.shape[2], rows.size)
    if rest or node.like.shape[3] != before[3] * times:
        return None
    reach, mode = {"upsample_bilinear2d": (1, "bilinear"), "upsample_bicubic2d": (2, "bicubic")}[
        name
    ]
    found = Rows(2, rows.size * times, times)

    def around(span: Span) -> Span:
        return (
            max(0, span[0] // times - reach),
            min(rows.size, -(-span[1] // times) + reach),
        )

    def needed(span: Span) -> Needs:
        return ([around(span)],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        large = F.interpolate(pieces[0], scale_factor=times, mode=mode, align_corners=False)
        return large.narrow(2, span[0] - around(span)[0] * times, span[1] - span[0])

    return RowOp(found, (node.args[0].node,), (), needed, run, cheap=True)


RULES: dict[str, Rule] = {
    "pixel_shuffle": shuffled,
    "pixel_unshuffle": unshuffled,
    "repeat_interleave": enlarged,
    "upsample_nearest2d": enlarged,
    "upsample_bilinear2d": resampled,
    "upsample_bicubic2d": resampled,
}
