"""Convolution of frames (B, C, T, H, W) as one 2D convolution per frame, on a CPU.

For bands of few rows oneDNN has no fast 3D kernel: it copies each window, which takes up to 27
times the input, and reaches a third of the speed of the same products as 2D convolution. There, the
frames that a result frame depends on are channels: (B, C, T, H, W) is (B, C·T, H, W) as it lies in
memory, and so are the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.rule import RuleContext, argument

# In 16 bits the 3D kernels are as fast.
_DTYPES = (torch.float32, torch.float64)


def runs_by_frame(node: Node, context: RuleContext, axis: int) -> bool:
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
        and argument(node, 6, "groups", 1) == 1
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
