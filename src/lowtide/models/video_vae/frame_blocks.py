"""Blocks of a VideoVAE; parameters have the names of SeedVR2's files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.video_vae.causal_conv import CausalConv3d, FrameCache

_EPS = 1e-6


class FrameGroupNorm(nn.GroupNorm):
    """Group norm of each frame of (B, C, T, H, W) by its own statistics."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__(groups, channels, _EPS)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a clip of any number of frames."""
        batch = len(input)
        images = super().forward(input.transpose(1, 2).flatten(0, 1))
        return images.unflatten(0, (batch, -1)).transpose(1, 2)


class ResnetBlock(nn.Module):
    """Two causal convolutions, each after a norm, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = FrameGroupNorm(groups, in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels, 3)
        self.norm2 = FrameGroupNorm(groups, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3)
        changes = in_channels != out_channels
        self.conv_shortcut = nn.Conv3d(in_channels, out_channels, 1) if changes else None

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return frames of the same size, (B, out_channels, T, H, W)."""
        hidden = self.conv1(F.silu(self.norm1(frames)), cache)
        hidden = self.conv2(F.silu(self.norm2(hidden)), cache)
        return hidden + (frames if self.conv_shortcut is None else self.conv_shortcut(frames))


class FrameAttention(nn.Module):
    """Attention of one head among all places of each frame."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, _EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, frames: Tensor) -> Tensor:
        """Return frames of the same shape, (B, C, T, H, W)."""
        batch, _, _, height, _ = frames.shape
        images = frames.transpose(1, 2).flatten(0, 1)
        tokens = self.group_norm(images).flatten(2).transpose(1, 2).unsqueeze(1)
        seen = F.scaled_dot_product_attention(
            self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        )
        found = self.to_out[0](seen).squeeze(1).transpose(1, 2).unflatten(2, (height, -1))
        return frames + found.unflatten(0, (batch, -1)).transpose(1, 2)


class MidBlock(nn.Module):
    """Two residual blocks with attention in between, at the lowest resolution."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, groups) for _ in range(2))
        self.attentions = nn.ModuleList([FrameAttention(channels, groups)])

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return frames of the same shape, (B, C, T, H, W)."""
        frames = self.attentions[0](self.resnets[0](frames, cache))
        return self.resnets[1](frames, cache)


class FrameDownsample(nn.Module):
    """Convolution that halves height and width, and time if asked to."""

    def __init__(self, channels: int, *, halves_time: bool) -> None:
        super().__init__()
        kernel, stride = (3, 2) if halves_time else (1, 1)
        self.conv = CausalConv3d(channels, channels, (kernel, 3, 3), (stride, 2, 2))

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return (B, C, T', H / 2, W / 2); of time, the first frame is left alone."""
        return self.conv(frames, cache)


class FrameUpsample(nn.Module):
    """Channels to pixels, and to frames if asked to, and a causal convolution."""

    def __init__(self, channels: int, *, doubles_time: bool) -> None:
        super().__init__()
        self._doubles_time = doubles_time
        self._factors = 2, 2, 2 if doubles_time else 1  # of height, width and time
        times = 8 if doubles_time else 4
        self.upscale_conv = nn.Conv3d(channels, channels * times, 1)
        # begins as a repetition of pixels
        with torch.no_grad():
            same = torch.eye(channels).repeat(times, 1)
            self.upscale_conv.weight.copy_(same.reshape_as(self.upscale_conv.weight))
        self.conv = CausalConv3d(channels, channels, 3)

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return (B, C, T', 2 H, 2 W); the first frame of a clip makes one frame."""
        batch, channels, count, height, width = frames.shape
        down, across, along = self._factors
        split = self.upscale_conv(frames).view(
            batch, down, across, along, channels, count, height, width
        )
        frames = split.permute(0, 4, 5, 3, 6, 1, 7, 2).reshape(
            batch, channels, count * along, height * down, width * across
        )
        if cache.is_first and self._doubles_time:  # its first frame is there twice
            frames = torch.cat([frames[:, :, :1], frames[:, :, 2:]], 2)
        return self.conv(frames, cache)


class _Level(nn.Module):
    """Residual blocks of one level."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            ResnetBlock(out_channels if at else in_channels, out_channels, groups)
            for at in range(layers)
        )

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return frames (B, out_channels, T', H', W'), of the next level if there is one."""
        for block in (one for blocks in self.children() for one in blocks.children()):
            frames = block(frames, cache)
        return frames


class DownBlock(_Level):
    """Residual blocks of one level of the encoder, and the way down to the next."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        layers: int,
        groups: int,
        downsample: FrameDownsample | None,
    ) -> None:
        super().__init__(in_channels, out_channels, layers, groups)
        self.downsamplers = nn.ModuleList([] if downsample is None else [downsample])


class UpBlock(_Level):
    """Residual blocks of one level of the decoder, and the way up to the next."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        layers: int,
        groups: int,
        upsample: FrameUpsample | None,
    ) -> None:
        super().__init__(in_channels, out_channels, layers, groups)
        self.upsamplers = nn.ModuleList([] if upsample is None else [upsample])
