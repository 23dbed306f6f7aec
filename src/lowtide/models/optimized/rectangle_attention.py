"""CRAFT's window attention in rectangular windows."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.attention.window_attention import attend_windows
from lowtide.models.optimized.optimized_module import OptimizedModule
from lowtide.models.optimized.swin_blocks import gather_bias, merge_windows


class OptimizedRectangleAttention(OptimizedModule):
    """Replacement for spandrel CRAFT's ``Attention_regular``.

    Called as ``Attention_regular(qkv, H, W, mask, rpi, rpe_biases)``; with a mask the original
    runs.
    """

    def forward(
        self,
        qkv: Tensor,
        H: int,  # noqa: N803
        W: int,  # noqa: N803
        mask: Tensor | None = None,
        *,
        rpi: Tensor,
        rpe_biases: Tensor,
    ) -> Tensor:
        """Map ``qkv`` (3, B, N, C) to (B, H, W, C), N being H · W."""
        if torch.compiler.is_exporting() or mask is not None:
            return self.plain(qkv, H, W, mask=mask, rpi=rpi, rpe_biases=rpe_biases)
        plain = self.plain
        window = plain.H_sp, plain.W_sp
        places = window[0] * window[1]
        query, key, value = (self._windows(part, H, W, window) for part in qkv.unbind(0))
        bias = gather_bias(plain.pos(rpe_biases), rpi, places)
        found = attend_windows(query, key, value, bias, (), plain.scale)
        return merge_windows(found, H, W, window).view(qkv.shape[1], H, W, -1)

    def _windows(self, x: Tensor, height: int, width: int, window: tuple[int, int]) -> Tensor:
        """Partition (B, N, C) into windows (windows, heads, N, head dim)."""
        rows, columns = height // window[0], width // window[1]
        cut = x.reshape(len(x), rows, window[0], columns, window[1], self.plain.num_heads, -1)
        return cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(0, 2)
