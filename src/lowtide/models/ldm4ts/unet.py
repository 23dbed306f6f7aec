"""U-Net of LDM4TS, which predicts the velocity of a noisy latent, and its blocks.

The blocks are attention by the chosen backend, residual convolutions, and transformer layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.attention import LocalDevice, attention
from lowtide.attention.backends import get_backend
from lowtide.attention.functional import describe_tensors, resolve_cached
from lowtide.attention.spec import AttentionSpec
from lowtide.core.errors import UsageError
from lowtide.models.ldm4ts.config import Backend

_WIDTHS = 1, 2, 2  # of the levels, in widths of the first
_LONGEST_WAVE = 10_000.0

_GROUPS = 8
_PACKAGES = {"flash": "flash2", "sage": "sage"}
_SPEC = AttentionSpec()


class LatentUNet(nn.Module):
    """Velocity of a noisy latent, given features of the look-back.

    Three levels, each half as large as the one above, the lower two twice as wide; attention only
    where a level has few pixels, because without a fused kernel it holds scores of all pairs. The
    output begins at zero.

    Args:
        latent_shape: Channels, height and width of the latent.
        width: Channels at latent resolution.
        map_channels: Channels of the feature map, M; it is concatenated to the latent.
        vector: Size of the feature vector, V.
        diffusion_steps: Number of times.
        choice: Attention backend, and the size of its heads.
        attention_tokens: Pixels that a level has at most to attend.
        checkpointing: Recompute each block in the backward pass.
    """

    def __init__(
        self,
        latent_shape: tuple[int, int, int],
        width: int,
        map_channels: int,
        vector: int,
        diffusion_steps: int,
        choice: AttentionChoice,
        *,
        attention_tokens: int = 64,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        channels, height, spread = latent_shape
        self._steps, self._checkpointing = diffusion_steps, checkpointing
        widths = [width * factor for factor in _WIDTHS]
        levels = range(len(widths))
        sizes = [(-(-height >> level), -(-spread >> level)) for level in levels]

        def block(in_channels: int, level: int) -> LatentBlock:
            attends = math.prod(sizes[level]) <= attention_tokens
            return LatentBlock(in_channels, widths[level], vector, choice if attends else None)

        self.time = nn.Sequential(
            nn.Linear(vector, vector), nn.SiLU(), nn.Linear(vector, vector), nn.SiLU()
        )
        self.conv_in = nn.Conv2d(channels + map_channels, width, 3, padding=1)
        self.down = nn.ModuleList(block(widths[level], level) for level in levels)
        self.shrink = nn.ModuleList(
            nn.Conv2d(given, made, 3, stride=2, padding=1) for given, made in pairwise(widths)
        )
        self.up = nn.ModuleList(block(2 * widths[level], level) for level in levels[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(made, given, 1) for given, made in pairwise(widths))
        self.norm_out = group_norm(width)
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)
        for one in self.conv_out.parameters():
            nn.init.zeros_(one)

    def forward(self, noisy: Tensor, time: Tensor, image: Tensor, vector: Tensor) -> Tensor:
        """Return velocities (B, C, h, w).

        Args:
            noisy: Noisy latents (B, C, h, w).
            time: Their times (B,), integers from 0 to ``diffusion_steps`` - 1.
            image: Feature map (B, M, h, w).
            vector: Feature vector (B, V).
        """
        vector = self.time(self._waves(time, vector)) + vector
        x = self.conv_in(torch.cat([noisy, image], dim=1))
        passed = []
        for level, block in enumerate(self.down):
            x = self._run(block, self.shrink[level - 1](x) if level else x, vector)
            passed.append(x)
        passed.pop()
        for grow, block in zip(reversed(self.grow), reversed(self.up), strict=True):
            skip = passed.pop()
            x = F.interpolate(grow(x), size=skip.shape[2:], mode="nearest")
            x = self._run(block, torch.cat([x, skip], dim=1), vector)
        return self.conv_out(F.silu(self.norm_out(x)))

    def _run(self, block: Callable[..., Tensor], x: Tensor, vector: Tensor) -> Tensor:
        if self._checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, x, vector, use_reentrant=False)
        return block(x, vector)

    def _waves(self, time: Tensor, vector: Tensor) -> Tensor:
        """Return sines and cosines (B, V) of times, whatever their number."""
        half = vector.shape[1] // 2
        rates = torch.arange(half, device=time.device) * (-math.log(_LONGEST_WAVE) / half)
        place = (time + 1) * (1000.0 / self._steps)
        angle = place[:, None] * rates.exp()
        return torch.cat([angle.sin(), angle.cos()], dim=1).to(vector.dtype)


class AttentionChoice:
    """Backend of all attention of one model, and what runs instead where it cannot.

    ``default`` and ``sdpa`` are PyTorch's fused scaled_dot_product_attention, which
    `lowtide.attention.use` can route elsewhere; ``flash`` and ``sage`` are packages, which fused
    SDPA replaces where they are not installed, with a note.

    Args:
        name: Name of the backend.
        device: Where the model is.
        head_dim: Channels of a head.

    Attributes:
        notes: What is not as asked for; each is a warning, too.
    """

    def __init__(self, name: Backend, device: torch.device, head_dim: int = 64) -> None:
        self.name, self.head_dim, self.notes = name, head_dim, list[str]()
        self._package: str | None = _PACKAGES.get(name)
        if self._package is not None:
            missing = get_backend(self._package).missing_requirement(LocalDevice.of(device))
            if missing is not None:
                self._note(missing.reason, missing.fix)
                self._package = None

    @property
    def is_inference_only(self) -> bool:
        """Whether the backend that runs has no backward pass."""
        return self._package == "sage"

    def require_gradients(self) -> None:
        """Raise `UsageError` if the backend that runs has no backward pass."""
        if self.is_inference_only:
            raise UsageError(
                "attention backend sage has no backward pass, so it cannot be used for training",
                hint="attention_backend='flash' or 'sdpa'; sage is for inference",
            )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention (B, heads, N, head dim) of three tensors of that shape."""
        if self._package is None:
            return F.scaled_dot_product_attention(query, key, value)
        call, device = (
            describe_tensors(query, key, value, None, _SPEC),
            LocalDevice.of(query.device),
        )
        found = resolve_cached(call, device, self._package, "prefer")
        if found.fallback is not None:
            self._note(found.fallback)
        return attention(query, key, value, resolution=found)

    def _note(self, reason: str, fix: str = "") -> None:
        text = f"attention backend {self.name}: {reason}; fused SDPA runs instead"
        text += f" ({fix})" if fix else ""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, stacklevel=2)


class SelfAttention(nn.Module):
    """Self-attention of tokens, (B, N, C) to (B, N, C)."""

    def __init__(self, channels: int, choice: AttentionChoice) -> None:
        super().__init__()
        self.heads = max(1, channels // choice.head_dim)
        while channels % self.heads:
            self.heads -= 1
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self._choice = choice

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        batch, count, channels = tokens.shape
        parts = self.qkv(tokens).reshape(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self._choice(*(part.contiguous() for part in parts.unbind()))
        return self.out(mixed.transpose(1, 2).reshape(batch, count, channels))


class TransformerLayer(nn.Module):
    """Attention and a perceptron, each on normalized tokens and added: (B, N, C) to (B, N, C)."""

    def __init__(self, channels: int, choice: AttentionChoice) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.attention = SelfAttention(channels, choice)
        self.perceptron = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        tokens = tokens + self.attention(self.norms[0](tokens))
        return tokens + self.perceptron(self.norms[1](tokens))


class LatentBlock(nn.Module):
    """Residual block of two convolutions; a vector scales and shifts its features (FiLM).

    With a ``choice`` of attention, that of all pixels follows.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        vector: int,
        choice: AttentionChoice | None,
    ) -> None:
        super().__init__()
        self.norm_in, self.norm = group_norm(in_channels), group_norm(channels)
        self.conv_in = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.film = nn.Linear(vector, 2 * channels)
        same = in_channels == channels
        self.skip = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1)
        self.attention = None if choice is None else TransformerLayer(channels, choice)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        """Map (B, C, h, w) and a vector (B, V) to (B, C', h, w)."""
        x = self.conv_in(F.silu(self.norm_in(image)))
        scale, shift = self.film(vector)[:, :, None, None].chunk(2, dim=1)
        x = self.conv(F.silu(self.norm(x) * (1 + scale) + shift)) + self.skip(image)
        if self.attention is None:
            return x
        return self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group norm of at most 8 groups."""
    return nn.GroupNorm(math.gcd(channels, _GROUPS), channels)
