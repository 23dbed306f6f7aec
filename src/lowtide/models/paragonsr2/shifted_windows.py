"""Unmasked shifted-window attention of the public ParagonSR2 checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShiftedWindowAttention(nn.Module):
    """Multi-head self-attention in cyclically shifted windows, without a mask.

    Maps (B, C, H, W) to (B, C, H, W). The map is zero-padded to whole windows, and windows shifted
    by ``shift`` pixels hold pixels of opposite borders: both are attended to like any other pixel,
    without a mask or a position bias. The checkpoints were trained so; new models should prefer
    `lowtide.attention.spatial.LocalWindowAttention`, whose windows end where the image does.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within the windows of (B, C, H, W), to the same shape."""
        side, (height, width) = self.window, x.shape[2:]
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, -width % side, 0, -height % side))
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        batch, rows, columns, channels = x.shape
        cells = x.view(batch, rows // side, side, columns // side, side, channels)
        tokens = cells.permute(0, 1, 3, 2, 4, 5).reshape(-1, side * side, channels)
        qkv = self.qkv(tokens).view(-1, side * side, 3, self.heads, channels // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value)
        tokens = self.proj(found.transpose(1, 2).reshape(-1, side * side, channels))
        cells = tokens.view(batch, rows // side, columns // side, side, side, channels)
        x = cells.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, channels)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, :height, :width].permute(0, 3, 1, 2)
