"""Rules of max pooling and average pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.conv import kernel_op, per_dim, spatial_axis
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import (
    Kernel,
    Rule,
    RuleContext,
    argument,
    op_name,
    replace_arg,
    samplewise,
)

# Workspace of max pooling: one map between its two passes, or PyTorch's indices of the maxima.
_MAX_POOL_WORKSPACE = 1.0


def pool(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a pooling to a band with its halo; no ``ceil_mode``, no dilation."""
    name = op_name(node.target)
    count, is_max = int(name[len("max_pool")]), name.startswith("max")
    at = spatial_axis(node, context, count)
    if at is None:
        return None
    size = per_dim(argument(node, 1, "kernel_size"), 1, count)
    step = argument(node, 2, "stride")
    stride = per_dim(step, 1, count) if step else size
    pad = per_dim(argument(node, 3, "padding", 0), 0, count)
    dilation = per_dim(argument(node, 4, "dilation", 1), 1, count) if is_max else (1,)
    ceil = argument(node, 5 if is_max else 4, "ceil_mode", False)
    count_include_pad = is_max or argument(node, 5, "count_include_pad", True)
    if ceil or set(dilation) != {1} or argument(node, 6, "divisor_override"):
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
    kernel = Kernel(size[at], stride[at], pad[at])
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


RULES: dict[str, Rule] = {
    f"{kind}_pool{count}d": samplewise(pool) for kind in ("max", "avg") for count in (1, 2, 3)
}
