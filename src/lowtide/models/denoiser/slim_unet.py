"""SlimUNet: a U-Net of residual blocks that are modulated by the noise level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.attention.functional import attention
from lowtide.attention.spatial import (
    ChannelAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
)
from lowtide.attention.spatial.image_layout import check_heads, check_image, default_heads
from lowtide.models.denoiser.config import SlimUNetConfig

# Levels are embedded by their logarithm, which has to be finite without noise too: this is less
# than the rounding of 16-bit samples.
_LEAST_SIGMA = 1e-5
_SHUFFLE = 2

# Values whose squares are added up at a time: they stay in a processor's cache.
_STRIP = 1 << 18


class GlobalAttention(nn.Module):
    """Softmax attention between all pixels: (B, ``channels``, H, W) to the same shape.

    Without a residual. Costs, for N pixels and C channels, 8·N·C² + 4·N²·C FLOPs, and with fused
    kernels about 4·N·C elements. ``backend`` is preferred, and the best other one takes its place
    where it does not support a call; None leaves the choice to PyTorch.
    """

    def __init__(self, channels: int, backend: str | None = None) -> None:
        super().__init__()
        self.channels, self.heads, self.backend = channels, default_heads(channels), backend
        check_heads(channels, self.heads)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        check_image(image, self.channels)
        tokens = self.qkv(image.flatten(2).transpose(1, 2))
        parts = tokens.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        # Exported as one operator, which streaming knows.
        if self.backend is None or torch.compiler.is_exporting():
            found = F.scaled_dot_product_attention(query, key, value)
        else:
            found = attention(query, key, value, backend=self.backend, policy="prefer")
        found = self.out(found.transpose(1, 2).flatten(2))
        return found.transpose(1, 2).unflatten(2, image.shape[2:])


_ATTENTION: dict[str, Callable[[int], nn.Module]] = {
    "linear": LinearAttention,
    "channel": ChannelAttention,
    "transposed": TransposedAttention,
    "sdpa": GlobalAttention,
    "flash": lambda channels: GlobalAttention(channels, "flash2"),
    "window": LocalWindowAttention,
}


class ModulatedBlock(nn.Module):
    """Residual block: two 3×3 convolutions, the second modulated, and attention if asked.

    ``attention`` is a module from (B, ``channels``, H, W) to the same shape, or None.
    """

    def __init__(self, channels: int, groups: int, attention: nn.Module | None) -> None:
        super().__init__()
        self.norm1 = AccurateGroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = AccurateGroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.attention = attention
        if attention is not None:
            self.norm3 = AccurateGroupNorm(groups, channels)

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """Map (B, C, H, W) and a gain and shift (B, 2·C, 1, 1) to (B, C, H, W)."""
        gain, shift = film.chunk(2, 1)
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.norm2(y) * (gain + 1) + shift
        x = x + self.conv2(F.silu(y))
        return x if self.attention is None else x + self.attention(self.norm3(x))


class SlimUNet(nn.Module):
    """U-Net for denoising, at half the input's size from its first layer on.

    Maps noisy (B, C, H, W) to what ``config.prediction`` names, of the same shape, both in the
    scale of diffusion models: values of unit variance. Sides are multiples of
    ``config.size.multiple_of``. Blocks are modulated by the noise level (FiLM, arXiv 1709.07871).
    With ``checkpointing`` a training step keeps no activations of blocks and computes them again.
    """

    def __init__(self, config: SlimUNetConfig) -> None:
        super().__init__()
        self.config, self.checkpointing = config, False
        widths, image = config.widths, config.channels * _SHUFFLE**2
        self.embed = nn.Sequential(
            nn.Linear(config.embedding + config.noise_parameters, config.embedding),
            nn.SiLU(),
            nn.Linear(config.embedding, config.embedding),
            nn.SiLU(),
        )
        self.film = nn.Linear(config.embedding, 2 * sum(config.film_channels))
        self.conv_in = nn.Conv2d(image, widths[0], 3, padding=1)
        last = len(widths) - 1
        self.down = nn.ModuleList(self._blocks(level) for level in range(last))
        self.shrink = nn.ModuleList(
            nn.Conv2d(width, below, 2, stride=2) for width, below in pairwise(widths)
        )
        self.middle = self._blocks(last)
        self.enlarge = nn.ModuleList(
            nn.Conv2d(below, 4 * width, 1) for width, below in pairwise(widths)
        )
        self.up = nn.ModuleList(self._blocks(level) for level in range(last))
        self.norm_out = AccurateGroupNorm(config.groups, widths[0])
        self.conv_out = nn.Conv2d(widths[0], image, 3, padding=1)
        self._init_weights()

    def _blocks(self, level: int) -> nn.ModuleList:
        """Return a level's blocks, the last of which has its attention."""
        config, width = self.config, self.config.widths[level]
        attends = config.attends(level)
        return nn.ModuleList(
            ModulatedBlock(
                width,
                config.groups,
                _ATTENTION[config.attention](width) if attends and last else None,
            )
            for last in (False,) * (config.blocks - 1) + (True,)
        )

    def _init_weights(self) -> None:
        """Let every block start as the identity, and the network as 0."""
        for module in self.modules():
            if isinstance(module, ModulatedBlock):
                nn.init.zeros_(module.conv2.weight)
        for layer in (self.film, self.conv_out):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def modulation(self, sigma: Tensor, parameters: Tensor | None = None) -> Tensor:
        """Return all blocks' gains and shifts (B, ``2·sum(film_channels)``, 1, 1).

        Args:
            sigma: Noise levels (B,) in fp32, relative to data of unit variance.
            parameters: The noise's other parameters (B, ``noise_parameters``), if it has any.
        """
        level = sigma.clamp(min=_LEAST_SIGMA).log()
        half = self.config.embedding // 2
        speeds = torch.logspace(-1, 1, half, device=sigma.device, dtype=sigma.dtype)
        angles = level[:, None] * speeds
        embedded = torch.cat([angles.sin(), angles.cos()], 1)
        if parameters is not None:
            embedded = torch.cat([embedded, parameters], 1)
        # Angles reach 100, which low precision would round by half a radian.
        return self.film(self.embed(embedded.to(self.film.weight.dtype)))[..., None, None]

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W), with a ``film`` of `modulation`."""
        films = iter(film.split([2 * channels for channels in self.config.film_channels], 1))
        x = self.conv_in(F.pixel_unshuffle(x, _SHUFFLE))
        passed: list[Tensor] = []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            x = self._run(blocks, x, films)
            passed.append(x)
            x = shrink(x)
        x = self._run(self.middle, x, films)
        for blocks, enlarge in zip(self.up[::-1], self.enlarge[::-1], strict=True):
            x = F.pixel_shuffle(enlarge(x), 2) + passed.pop()
            x = self._run(blocks, x, films)
        return F.pixel_shuffle(self.conv_out(F.silu(self.norm_out(x))), _SHUFFLE)

    def _run(self, blocks: nn.Module, x: Tensor, films: Iterator[Tensor]) -> Tensor:
        for block in blocks.children():
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, next(films), use_reentrant=False)
            else:
                x = block(x, next(films))
        return x


class AccurateGroupNorm(nn.GroupNorm):
    """GroupNorm of (B, C, H, W), accurate for large channels-last images on CPUs too.

    PyTorch adds the values of such an image up in fp32, one after the other, which is off by 7e-4
    at 500,000 pixels. Here they are added by channel, pairwise, and the channels of a group in
    fp64, which takes a third more time. Everything else is `torch.nn.GroupNorm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        if not _sums_in_fp32(input):
            return super().forward(input)
        pixels = input.movedim(1, 3)
        mean = self._group_mean(pixels.mean((1, 2)).double())
        variance = self._group_mean(_squares(pixels, mean.float()) / pixels[0, :, :, 0].numel())
        scale = (variance + self.eps).rsqrt()
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        scale, shift = (one.float()[..., None, None] for one in (scale, shift))
        return torch.addcmul(shift, input, scale)

    def _group_mean(self, channels: Tensor) -> Tensor:
        """Return, for each of the channels (B, C), the mean of its group."""
        means = channels.unflatten(1, (self.num_groups, -1)).mean(2)
        return means.repeat_interleave(self.num_channels // self.num_groups, 1)


def _squares(pixels: Tensor, mean: Tensor) -> Tensor:
    """Return sums of squares of pixels (B, H, W, C) less a ``mean`` (B, C), in fp64."""
    total = torch.zeros_like(mean, dtype=torch.float64)
    for strip in pixels.split(max(1, _STRIP // pixels[:, 0].numel()), 1):
        total += (strip - mean[:, None, None]).square_().sum((1, 2))
    return total


def _sums_in_fp32(image: Tensor) -> bool:
    """Return whether PyTorch's own operator would lose digits, and may be replaced."""
    return (
        image.device.type == "cpu"
        and image.dtype == torch.float32
        and image.dim() == 4
        and image.is_contiguous(memory_format=torch.channels_last)
        and not image.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_exporting()
    )
