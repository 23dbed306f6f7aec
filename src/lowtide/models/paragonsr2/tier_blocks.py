"""Blocks of the ParagonSR2 tiers, under the names of the public checkpoints' tensors.

Source of their shapes and of what they compute: Phhofm/ParagonSR2 (MIT). All take and give maps
(B, C, H, W).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.paragonsr2.shifted_windows import ShiftedWindowAttention

_HEADS, _EXPANSION = 4, 2
_TOKENS, _TOKEN_CHANNELS, _SQUEEZE = 64, 16, 16
# What fp16 holds: products of gates are cut to it in any precision.
_HALF = 65504.0


class RMSNorm(nn.Module):
    """Divides each pixel by the root of its channels' mean square, taken in fp32."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any (B, C, H, W)."""
        square = x.float().square().mean(1, keepdim=True)
        return self.scale * x / (square + self.eps).sqrt().to(x.dtype) + self.bias


class LayerScale(nn.Module):
    """A factor for each channel, small at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1, channels, 1, 1), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """Any (B, C, H, W)."""
        return x * self.gamma


class _Mixing(nn.Module):
    """Wider channels, a depthwise 3×3 convolution, and back: what most blocks begin with."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = _EXPANSION * channels
        self.conv1, self.conv2 = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, channels, 1)
        self.dw = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)

    def mixed(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        return self.conv2(F.gelu(self.dw(self.conv1(x))))


class NanoBlock(_Mixing):
    """Mixing, and nothing else (`realtime`)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        return x + self.scale(self.mixed(x))


class StreamBlock(nn.Module):
    """Two reaches side by side, then a gate (`stream`)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * _EXPANSION * channels
        self.dw1 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.dw3 = nn.Conv2d(channels, channels, 3, padding=3, dilation=3, groups=channels)
        self.fuse = nn.Conv2d(2 * channels, channels, 1)
        self.proj = nn.Conv2d(channels, wide, 1)
        self.gate = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.out = nn.Conv2d(wide // 2, channels, 1)
        self.scale = LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        both = self.fuse(torch.cat([self.dw1(x), self.dw3(x)], 1))
        one, other = self.gate(self.proj(both)).chunk(2, 1)
        gated = (one.float() * other.float()).clamp(-_HALF, _HALF).to(x.dtype)
        return x + self.scale(self.out(gated))


class PhotoBlock(_Mixing):
    """Normed mixing, then attention in windows by the same scale (`photo`)."""

    def __init__(self, channels: int, window: int, shift: int, attention: bool) -> None:
        super().__init__(channels)
        self.norm = RMSNorm(channels)
        self.scale = LayerScale(channels)
        self.attention = attention
        if attention:
            self.attn_norm = RMSNorm(channels)
            self.attn = ShiftedWindowAttention(channels, _HEADS, window, shift)

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        x = x + self.scale(self.mixed(self.norm(x)))
        return x + self.scale(self.attn(self.attn_norm(x))) if self.attention else x


class TierChannelAttention(nn.Module):
    """A factor for each channel, made of the mean over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = channels // _SQUEEZE
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, few, bias=False),
            nn.GELU(),
            nn.Linear(few, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        return x * self.fc(self.pool(x).flatten(1))[:, :, None, None]


class TokenAttention(nn.Module):
    """Each pixel asks a learned dictionary of tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token_dict = nn.Parameter(torch.randn(1, _TOKENS, channels) * 0.02)
        self.q_proj = nn.Linear(channels, _TOKEN_CHANNELS)
        self.k_proj = nn.Linear(channels, _TOKEN_CHANNELS)
        self.v_proj, self.out_proj = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        pixels = x.flatten(2).transpose(1, 2)
        keys, values = self.k_proj(self.token_dict), self.v_proj(self.token_dict)
        scores = self.q_proj(pixels) @ keys.transpose(1, 2) * _TOKEN_CHANNELS**-0.5
        found = self.out_proj(scores.softmax(-1) @ values)
        return found.transpose(1, 2).reshape(x.shape)


class ProBlock(_Mixing):
    """Normed mixing, channel attention, attention in windows, and a dictionary (`pro`)."""

    def __init__(self, channels: int, window: int, shift: int, attention: bool) -> None:
        super().__init__(channels)
        self.norm1, self.scale1 = RMSNorm(channels), LayerScale(channels)
        self.channel_attn, self.scale2 = TierChannelAttention(channels), LayerScale(channels)
        self.attention = attention
        if attention:
            self.norm3, self.scale3 = RMSNorm(channels), LayerScale(channels)
            self.window_attn = ShiftedWindowAttention(channels, _HEADS, window, shift)
        self.norm4, self.scale4 = RMSNorm(channels), LayerScale(channels)
        self.token_ca = TokenAttention(channels)

    def forward(self, x: Tensor) -> Tensor:
        """As large as it comes."""
        x = x + self.scale1(self.mixed(self.norm1(x)))
        x = x + self.scale2(self.channel_attn(x))
        if self.attention:
            x = x + self.scale3(self.window_attn(self.norm3(x)))
        return x + self.scale4(self.token_ca(self.norm4(x)))
