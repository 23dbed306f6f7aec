"""Encoder and decoder of a VideoVAE, slice by slice of a clip, and their blocks.

Parameters have the names of SeedVR2's files. Convolutions over frames see no later ones, and keep
some frames between slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.common_types import _size_3_t

from lowtide.models.video_vae.config import VideoVAEConfig

_COLORS = 3

_EPS = 1e-6


class _Part(nn.Module):
    """A part that maps slices of a clip, each by the state that the one before left."""

    def run_slice(
        self, given: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the result of a slice and the state after it; ``state`` is None at first."""
        cache = CausalFrameCache(state)
        return self(given, cache), cache.after


class VideoVAEEncoder(_Part):
    """Frames to the mean and log variance of latents.

    The first slice of a clip is 4n + 1 frames, a later one is 4n.
    """

    def __init__(self, config: VideoVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels, config.norm_num_groups
        last = len(widths) - 1
        self.conv_in = CausalConv3d(_COLORS, widths[0], 3)
        self.down_blocks = nn.ModuleList(
            DownBlock(
                widths[max(0, level - 1)],
                width,
                config.layers_per_block,
                groups,
                FrameDownsample(width, halves_time=level > 0) if level < last else None,
            )
            for level, width in enumerate(widths)
        )
        self.mid_block = MidBlock(widths[-1], groups)
        self.conv_norm_out = FrameGroupNorm(groups, widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels, 3)

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
        """Return (B, 2 C, n, H / 8, W / 8) of frames (B, 3, T, H, W) in -1..1."""
        hidden = self.conv_in(frames, cache)
        for block in self.down_blocks:
            hidden = block(hidden, cache)
        hidden = self.mid_block(hidden, cache)
        return self.conv_out(F.silu(self.conv_norm_out(hidden)), cache)


class VideoVAEDecoder(_Part):
    """Latents to frames: 4n - 3 of the n latents of a clip's first slice, 4n of a later one."""

    def __init__(self, config: VideoVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels[::-1], config.norm_num_groups
        last = len(widths) - 1
        self.conv_in = CausalConv3d(config.latent_channels, widths[0], 3)
        self.mid_block = MidBlock(widths[0], groups)
        self.up_blocks = nn.ModuleList(
            UpBlock(
                widths[max(0, level - 1)],
                width,
                config.layers_per_block + 1,
                groups,
                FrameUpsample(width, doubles_time=level < last - 1) if level < last else None,
            )
            for level, width in enumerate(widths)
        )
        self.conv_norm_out = FrameGroupNorm(groups, widths[-1])
        self.conv_out = CausalConv3d(widths[-1], _COLORS, 3)

    def forward(self, latents: Tensor, cache: CausalFrameCache) -> Tensor:
        """Return frames (B, 3, T, 8 h, 8 w), about -1..1, of latents (B, C, n, h, w)."""
        hidden = self.mid_block(self.conv_in(latents, cache), cache)
        for block in self.up_blocks:
            hidden = block(hidden, cache)
        return self.conv_out(F.silu(self.conv_norm_out(hidden)), cache)


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

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
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

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
        """Return frames of the same shape, (B, C, T, H, W)."""
        frames = self.attentions[0](self.resnets[0](frames, cache))
        return self.resnets[1](frames, cache)


class FrameDownsample(nn.Module):
    """Convolution that halves height and width, and time if asked to."""

    def __init__(self, channels: int, *, halves_time: bool) -> None:
        super().__init__()
        kernel, stride = (3, 2) if halves_time else (1, 1)
        self.conv = CausalConv3d(channels, channels, (kernel, 3, 3), (stride, 2, 2))

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
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

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
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

    def forward(self, frames: Tensor, cache: CausalFrameCache) -> Tensor:
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


class CausalFrameCache:
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
        self, frames: Tensor, cache: CausalFrameCache
    ) -> Tensor:
        """Convolve a slice of a clip."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if kernel > 1:
            frames = cache.extend(frames, kernel, stride)
        return super().forward(F.pad(frames, (0, 1, 0, 1)) if self._pads_end else frames)
