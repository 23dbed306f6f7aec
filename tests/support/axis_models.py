"""Small models over clips, series and volumes, with what the large ones of their kinds contain."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class CausalConv(nn.Conv3d):
    """A convolution whose frames depend on earlier ones; the first frame is repeated before it."""

    def forward(self, clip):
        around = clip
        if sum(self.kernel_size) > 3:
            frames = F.pad(clip, (1, 1, 1, 1))
            around = torch.cat([frames[:, :, :1]] * (self.kernel_size[0] - 1) + [frames], 2)
        return super().forward(around)


class FrameNorm(nn.GroupNorm):
    """A group norm of each frame alone."""

    def forward(self, clip):
        frames = clip.transpose(1, 2)
        return super().forward(frames.flatten(0, 1)).view(frames.shape).transpose(1, 2)


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norms = nn.ModuleList(FrameNorm(4, channels) for _ in range(2))
        self.convs = nn.ModuleList(CausalConv(channels, channels, 3) for _ in range(2))

    def forward(self, x):
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y)))
        return x + y


class FrameAttention(nn.Module):
    """Attention of one head within each frame."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        batch, channels, frames, height, width = x.shape
        tokens = x.transpose(1, 2).reshape(batch * frames, channels, height, width)
        tokens = self.norm(tokens).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens)[:, None].chunk(3, -1)
        tokens = self.out(F.scaled_dot_product_attention(query, key, value)[:, 0])
        tokens = tokens.transpose(1, 2).reshape(batch, frames, channels, height, width)
        return x + tokens.transpose(1, 2)


class NearestUpsampling(nn.Module):
    """Twice the frames and sides by repetition, the first frame apart."""

    def __init__(self, channels):
        super().__init__()
        self.conv = CausalConv(channels, channels, 3)

    def forward(self, x):
        if x.shape[2] > 1:
            first, rest = x[:, :, 0], x[:, :, 1:]
            first = F.interpolate(first, scale_factor=2)[:, :, None]
            x = torch.cat([first, F.interpolate(rest, scale_factor=2)], 2)
        else:
            x = F.interpolate(x[:, :, 0], scale_factor=2)[:, :, None]
        return self.conv(x)


class ShuffledUpsampling(nn.Module):
    """Twice the frames and sides from channels, the doubled first frame dropped."""

    def __init__(self, channels):
        super().__init__()
        self.grow = nn.Conv3d(channels, 8 * channels, 1)
        self.conv = CausalConv(channels, channels, 3)

    def forward(self, x):
        batch, channels, frames, height, width = x.shape
        x = self.grow(x).view(batch, 2, 2, 2, channels, frames, height, width)
        x = x.permute(0, 4, 5, 3, 6, 1, 7, 2)
        x = x.reshape(batch, channels, 2 * frames, 2 * height, 2 * width)
        return self.conv(x[:, :, 1:])


class VideoDecoder(nn.Module):
    """Decoder of a causal video autoencoder: 1 + t latents (B, C, T, H, W) to 1 + 4t frames."""

    def __init__(self, channels=8):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            CausalConv(4, channels, 3),
            ResidualBlock(channels),
            FrameAttention(channels),
            NearestUpsampling(channels),
            ShuffledUpsampling(channels),
            ResidualBlock(channels),
            FrameNorm(4, channels),
            nn.SiLU(),
            CausalConv(channels, 3, 3),
        )

    def forward(self, latents):
        return self.body(latents)


class VideoEncoder(nn.Module):
    """Encoder of a causal video autoencoder: 1 + 2t frames (B, C, T, H, W) to 1 + t latents."""

    def __init__(self, channels=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = CausalConv(3, channels, 3), ResidualBlock(channels)
        self.down = nn.Conv3d(channels, channels, 3, 2)
        self.last = CausalConv(channels, 8, 3)

    def forward(self, clip):
        x = self.block(self.first(clip))
        x = F.pad(x, (0, 1, 0, 1))
        x = self.down(torch.cat([x[:, :, :1], x[:, :, :1], x], 2))
        return self.last(x).chunk(2, 1)[0]


class SeriesModel(nn.Module):
    """Patches of a series (B, C, L), attention over all of them, and as many steps again."""

    def __init__(self, channels=16, heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.first = nn.Conv1d(3, channels, 9, padding=4)
        self.wide = nn.Conv1d(channels, channels, 3, padding="same", dilation=4)
        self.down = nn.Conv1d(channels, channels, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.up = nn.ConvTranspose1d(channels, channels, 4, 4)
        self.last = nn.Conv1d(channels, 3, 9, padding=4)

    def forward(self, series):
        scale = series.std(-1, keepdim=True) + 1e-5
        mean = series.mean(-1, keepdim=True)
        x = self.first((series - mean) / scale)
        x = x + F.gelu(self.wide(x))
        tokens = self.down(F.pad(x, (0, -x.shape[-1] % 4))).transpose(1, 2)
        batch, steps, channels = tokens.shape
        qkv = self.qkv(self.norms[0](tokens)).view(batch, steps, 3, self.heads, -1)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        tokens = tokens + self.out(attended.transpose(1, 2).reshape(batch, steps, channels))
        tokens = tokens + self.mlp(self.norms[1](tokens))
        x = x + self.up(tokens.transpose(1, 2))[..., : x.shape[-1]]
        return self.last(x) * scale + mean


class VolumeUNet(nn.Module):
    """A U-Net over volumes (B, C, D, H, W) of any size, with instance norms."""

    def __init__(self, channels=8, levels=2):
        super().__init__()
        torch.manual_seed(0)
        sizes = [channels << level for level in range(levels + 1)]
        pairs = list(pairwise(sizes))
        self.first = self.block(2, channels)
        self.down = nn.ModuleList(nn.Conv3d(one, two, 3, 2, 1) for one, two in pairs)
        self.inner = nn.ModuleList(self.block(two, two) for _, two in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(two, one, 2, 2) for one, two in pairs)
        self.outer = nn.ModuleList(self.block(2 * one, one) for one, _ in pairs)
        self.last = nn.Conv3d(channels, 2, 1)

    @staticmethod
    def block(before, after):
        return nn.Sequential(
            nn.Conv3d(before, after, 3, padding=1),
            nn.InstanceNorm3d(after, affine=True),
            nn.LeakyReLU(0.01),
        )

    def forward(self, volume):
        x, kept = self.first(volume), []
        for down, inner in zip(self.down, self.inner, strict=True):
            kept.append(x)
            x = inner(down(x))
        for up, outer in zip(reversed(self.up), reversed(self.outer), strict=True):
            other = kept.pop()
            depth, height, width = other.shape[2:]
            x = outer(torch.cat([other, up(x)[:, :, :depth, :height, :width]], 1))
        return self.last(x)
