"""Models whose operators need workspaces."""

import torch

from lowtide.memory.tracing.trace import describe_argument

_aten = torch.ops.aten


def convolution(
    rows: int = 64,
    *,
    channels_last: bool = False,
    stride: int = 1,
    dtype=torch.float32,
    width: int = 600,
):
    image = torch.empty(1, 16, rows, width, dtype=dtype)
    if channels_last:
        image = image.to(memory_format=torch.channels_last)
    kernel, bias = torch.empty(24, 16, 3, 3, dtype=dtype), torch.empty(24, dtype=dtype)
    settings = [stride, stride], [1, 1], [1, 1], False, [0, 0], 1
    args = tuple(describe_argument(arg) for arg in (image, kernel, bias, *settings))
    return _aten.convolution.default, args, {}
