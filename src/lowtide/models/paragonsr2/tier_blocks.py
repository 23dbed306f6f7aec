"""Blocks of the ParagonSR2 tiers, with state_dict keys of the public checkpoints; upsampling.

Source of their sizes and of what they compute: Phhofm/ParagonSR2 (MIT). All map (B, C, H, W) to
(B, C, H, W).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEADS, _EXPANSION = 4, 2
_TOKENS, _TOKEN_CHANNELS, _SQUEEZE = 64, 16, 16
# Largest fp16 value: gated products are clamped to it in any precision.
_HALF = 65504.0

# J. Costella, "The magic kernel": the smallest spline of the family and its sharpening filter.
BLUR = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
SHARP = (-1 / 32, 0.0, 9 / 32, 16 / 32, 9 / 32, 0.0, -1 / 32)


class PixelRMSNorm(nn.Module):
    """RMS norm over the channels of each pixel, with scale and bias.

    The mean square is computed in fp32.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (B, C, H, W) over C."""
        square = x.float().square().mean(1, keepdim=True)
        return self.scale * x / (square + self.eps).sqrt().to(x.dtype) + self.bias


class LayerScale(nn.Module):
    """Learned factor per channel, initialized to ``initial``."""

    def __init__(self, channels: int, initial: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1, channels, 1, 1), initial))

    def forward(self, x: Tensor) -> Tensor:
        """Scale (B, C, H, W) per channel."""
        return x * self.gamma


class _Mixing(nn.Module):
    """Inverted bottleneck with a depthwise 3×3 convolution, the start of most blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = _EXPANSION * channels
        self.conv1, self.conv2 = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, channels, 1)
        self.dw = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)

    def mix(self, x: Tensor) -> Tensor:
        """Expand, filter depthwise, apply GELU and project back."""
        return self.conv2(F.gelu(self.dw(self.conv1(x))))


class RealtimeBlock(_Mixing):
    """Block of tier ``realtime``: an inverted bottleneck."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return x + self.scale(self.mix(x))


class StreamBlock(nn.Module):
    """Block of tier ``stream``: depthwise convolutions of two dilations, then a gate."""

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
        """Map (B, C, H, W) to (B, C, H, W)."""
        both = self.fuse(torch.cat([self.dw1(x), self.dw3(x)], 1))
        one, other = self.gate(self.proj(both)).chunk(2, 1)
        gated = (one.float() * other.float()).clamp(-_HALF, _HALF).to(x.dtype)
        return x + self.scale(self.out(gated))


class PhotoBlock(_Mixing):
    """Block of tier ``photo``: inverted bottleneck, then shifted-window attention.

    Both are normed, and both use one LayerScale.
    """

    def __init__(self, channels: int, window: int, shift: int, attention: bool) -> None:
        super().__init__(channels)
        self.norm = PixelRMSNorm(channels)
        self.scale = LayerScale(channels)
        self.attention = attention
        if attention:
            self.attn_norm = PixelRMSNorm(channels)
            self.attn = ShiftedWindowAttention(channels, _HEADS, window, shift)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = x + self.scale(self.mix(self.norm(x)))
        return x + self.scale(self.attn(self.attn_norm(x))) if self.attention else x


class TierChannelAttention(nn.Module):
    """Squeeze-and-excitation: a factor per channel from the mean over the image."""

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
        """Map (B, C, H, W) to (B, C, H, W)."""
        return x * self.fc(self.pool(x).flatten(1))[:, :, None, None]


class TokenAttention(nn.Module):
    """Cross-attention of each pixel to a learned dictionary of tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token_dict = nn.Parameter(torch.randn(1, _TOKENS, channels) * 0.02)
        self.q_proj = nn.Linear(channels, _TOKEN_CHANNELS)
        self.k_proj = nn.Linear(channels, _TOKEN_CHANNELS)
        self.v_proj, self.out_proj = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        pixels = x.flatten(2).transpose(1, 2)
        keys, values = self.k_proj(self.token_dict), self.v_proj(self.token_dict)
        scores = self.q_proj(pixels) @ keys.transpose(1, 2) * _TOKEN_CHANNELS**-0.5
        found = self.out_proj(scores.softmax(-1) @ values)
        return found.transpose(1, 2).reshape(x.shape)


class ProBlock(_Mixing):
    """Block of tier ``pro``: bottleneck, channel, window and token attention.

    Shifted-window attention is left out where ``attention`` is False.
    """

    def __init__(self, channels: int, window: int, shift: int, attention: bool) -> None:
        super().__init__(channels)
        self.norm1, self.scale1 = PixelRMSNorm(channels), LayerScale(channels)
        self.channel_attn, self.scale2 = TierChannelAttention(channels), LayerScale(channels)
        self.attention = attention
        if attention:
            self.norm3, self.scale3 = PixelRMSNorm(channels), LayerScale(channels)
            self.window_attn = ShiftedWindowAttention(channels, _HEADS, window, shift)
        self.norm4, self.scale4 = PixelRMSNorm(channels), LayerScale(channels)
        self.token_ca = TokenAttention(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = x + self.scale1(self.mix(self.norm1(x)))
        x = x + self.scale2(self.channel_attn(x))
        if self.attention:
            x = x + self.scale3(self.window_attn(self.norm3(x)))
        return x + self.scale4(self.token_ca(self.norm4(x)))


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


class MagicKernelUpsample(nn.Module):
    """Magic Kernel upsampling by an integer factor, with optional sharpening.

    Maps (B, C, H, W) to (B, C, H * scale, W * scale): sharpened by a share ``alpha``, upsampled by
    pixel repetition, blurred. Borders are zero-padded, before the blur as before the sharpening.
    The blur of repeated pixels is computed as one small filter of the input for each of the
    ``scale ** 2`` phases, so that nothing runs at the output size. Kernels are non-persistent
    buffers, not in checkpoints.
    """

    keeps_fp32 = True  # where the networks around it are trained in low precision

    def __init__(self, channels: int, scale: int, alpha: float) -> None:
        super().__init__()
        self.channels, self.scale, self.alpha = channels, scale, alpha
        sharp, phases = torch.tensor(SHARP), self._phases(scale)
        self.sharp: Tensor
        self.places: Tensor
        self.register_buffer(
            "sharp", torch.outer(sharp, sharp).expand(channels, 1, -1, -1).clone(), persistent=False
        )
        places = torch.einsum("iy,jx->ijyx", phases, phases).flatten(0, 1)[:, None]
        self.register_buffer("places", places.repeat(channels, 1, 1, 1), persistent=False)

    @staticmethod
    def _phases(scale: int) -> Tensor:
        """Return the filter taps of each phase of an upsampled pixel, (scale, taps)."""
        far = len(BLUR) // 2
        reach = -(-far // scale)
        phases = torch.zeros(scale, 2 * reach + 1)
        for place in range(scale):
            for tap, weight in enumerate(BLUR):
                phases[place, reach + (place + tap - far) // scale] += weight
        return phases

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H * scale, W * scale)."""
        if self.alpha:
            sharp = F.conv2d(x, self.sharp, padding=len(SHARP) // 2, groups=self.channels)
            # Not torch.lerp, which needs one dtype: under autocast there are two.
            x = x + self.alpha * (sharp - x)
        places = F.conv2d(x, self.places, padding=self.places.shape[-1] // 2, groups=self.channels)
        return F.pixel_shuffle(places, self.scale)
