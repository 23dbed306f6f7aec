"""Rules of max pooling and average pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.conv import kernel_op, pair
from lowtide.streaming.rules.kernel_extent import Kernel
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.rules.rule import Rule, RuleContext, argument, op_name

# Workspace of max pooling: one map between its two passes, or PyTorch's indices of the maxima.
_MAX_POOL_WORKSPACE = 1.0
_NAMES = {"max_pool2d", "avg_pool2d"}


def pool2d(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a 2D pooling to a band with its halo; no ``ceil_mode``, no dilation."""
    if len(node.meta.shape) != 4 or op_name(node.target) not in _NAMES:
        return None
    size = pair(argument(node, 1, "kernel_size"), 1)
    step = argument(node, 2, "stride")
    stride = pair(step, 1) if step else size
    pad = pair(argument(node, 3, "padding", 0), 0)
    is_max = op_name(node.target) == "max_pool2d"
    dilation = pair(argument(node, 4, "dilation", 1), 1) if is_max else (1, 1)
    ceil = argument(node, 5 if is_max else 4, "ceil_mode", False)
    count_include_pad = is_max or argument(node, 5, "count_include_pad", True)
    if ceil or dilation != (1, 1) or argument(node, 6, "divisor_override"):
        return None
    if not count_include_pad and any(pad):
        return None

    def run(piece: Tensor, whole: Sequence[Tensor], rows: int) -> Tensor:
        if not is_max:
            return F.avg_pool2d(piece, size, stride, (rows, pad[1]))
        if stride == (1, 1) and piece.device.type == "cpu":
            return max_pool2d(piece, size, (rows, pad[1]))
        return F.max_pool2d(piece, size, stride, (rows, pad[1]))

    fill, scratch = (-math.inf, _MAX_POOL_WORKSPACE) if is_max else (0.0, 0.0)
    kernel = Kernel(size[0], stride[0], pad[0])
    return kernel_op(node, context, kernel, fill, run, cheap=True, workspace_share=scratch)


def max_pool2d(image: Tensor, size: tuple[int, int], pad: tuple[int, int]) -> Tensor:
    """Max pooling with stride 1 in two passes: along H, then along W.

    Same values as `torch.nn.functional.max_pool2d`, whose CPU kernel visits each element of each
    window and is ten times slower.

    Args:
        image: Input, (B, C, H, W).
        size: Kernel height and width.
        pad: Padding of rows and of columns.
    """
    down = _max_along(image, 2, size[0], pad[0])
    return _max_along(down, 3, size[1], pad[1])


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


RULES: dict[str, Rule] = {"max_pool2d": pool2d, "avg_pool2d": pool2d}
