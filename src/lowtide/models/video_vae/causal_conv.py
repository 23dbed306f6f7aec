"""Convolutions over frames that see no later ones, and what they keep between slices of a clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.common_types import _size_3_t


class FrameCache:
    """Frames that the convolutions of one pass take from the slice before and leave for the next.

    They are in the order of the calls, which every slice makes alike.

    Attributes:
        after: What is left for the next slice so far.
    """

    def __init__(self, before: Sequence[Tensor] | None) -> None:
        """Begin a pass; ``before`` is what the last one left, or None for the first slice."""
        self._before = None if before is None else iter(before)
        self.after: list[Tensor] = []

    @property
    def is_first(self) -> bool:
        """Whether there are no frames before this slice."""
        return self._before is None

    def extend(self, frames: Tensor, kernel: int, stride: int) -> Tensor:
        """Put earlier frames before a slice (B, C, T, H, W), and keep its last ones.

        Before the first frame of a clip there are copies of it.
        """
        if self._before is None:
            earlier = [frames[:, :, :1]] * (kernel - 1)
        else:
            earlier = [next(self._before)]
        seen = torch.cat([*earlier, frames], 2)
        # copied, since a view would hold all of the slice
        self.after.append(seen[:, :, stride - kernel :].clone())
        return seen


class CausalConv3d(nn.Conv3d):
    """Convolution (B, C, T, H, W) whose result depends on a frame and those before it.

    Rows and columns are padded by zeros: on both sides, or at the end only where it halves them.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_3_t,
        stride: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        halves = stride[1] > 1
        padding = (0, 0, 0) if halves else (0, 1, 1)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self._pads_end = halves

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, frames: Tensor, cache: FrameCache
    ) -> Tensor:
        """Convolve a slice of a clip."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if kernel > 1:
            frames = cache.extend(frames, kernel, stride)
        return super().forward(F.pad(frames, (0, 1, 0, 1)) if self._pads_end else frames)
