"""Networks of the zoo that no library offers in this form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Residual convolutions, then ×2 by pixel shuffle: (B, 3, H, W) to (B, 3, 2H, 2W).

    The trunk of EDSR (Lim et al., arXiv:1707.02921) without its residual scaling.
    """

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(_Residual(width) for _ in range(blocks))
        self.tail = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, image: Tensor) -> Tensor:
        first = value = self.head(image)
        for block in self.body:
            value = block(value)
        return self.tail(value + first)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, value: Tensor) -> Tensor:
        return value + self.layers(value)


class DiffusionTransformer(nn.Module):
    """Noise of a latent by attention over patches of 2: (B, 4, H, W), (B,) to (B, 4, H, W).

    DiT with adaLN-Zero (Peebles and Xie, arXiv:2212.09748), without class labels.
    """

    def __init__(self, width: int = 256, depth: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_AttentionBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(width, 16)

    def forward(self, latent: Tensor, time: Tensor) -> Tensor:
        value = self.patch(latent)
        height, width = value.shape[-2:]
        places = torch.arange(height * width, device=latent.device)
        value = value.flatten(2).transpose(1, 2) + _waves(places, self.width).to(value.dtype)
        condition = self.time(_waves(time, self.width).to(value.dtype))
        for block in self.blocks:
            value = block(value, condition)
        value = self.out(self.norm(value))
        value = value.transpose(1, 2).unflatten(2, (height, width))
        return F.pixel_shuffle(value, 2)


class _AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, value: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulate(condition)[:, None].chunk(6, -1)
        seen = self.norms[0](value) * (1 + scale) + shift
        qkv = self.qkv(seen).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2)
        value = value + gate * self.join(seen)
        return value + gate2 * self.mlp(self.norms[1](value) * (1 + scale2) + shift2)


def _waves(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of (N,) places, (N, width)."""
    rates = torch.exp(torch.arange(width // 2, device=places.device) * (-math.log(1e4) * 2 / width))
    angles = places.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class HalfOfVae(nn.Module):
    """The decoder (or else the encoder) of a diffusers AutoencoderKL as a model of its own."""

    def __init__(self, vae: Any, *, decoder: bool) -> None:
        super().__init__()
        self.layers = (
            nn.Sequential(vae.post_quant_conv, vae.decoder)
            if decoder
            else nn.Sequential(vae.encoder, vae.quant_conv)
        )

    def forward(self, value: Tensor) -> Tensor:
        return self.layers(value)
