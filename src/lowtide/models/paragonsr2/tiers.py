"""The published ParagonSR2 tiers: realtime, stream, photo and pro, and their checkpoints.

A checkpoint is recognized by its state_dict keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.paragonsr2.config import Tier, TierConfig
from lowtide.models.paragonsr2.tier_blocks import (
    BLUR,
    SHARP,
    MagicKernelUpsample,
    PhotoBlock,
    ProBlock,
    RealtimeBlock,
    StreamBlock,
)

FAMILY = "ParagonSR2"
_REQUIRED_LAYERS = ("conv_in", "conv_mid", "up.0", "conv_out")
_BLOCK = "body.0.blocks.0."
# A key of the first block that no later tier in this table has.
_TIER_KEYS: dict[Tier, str] = {
    "stream": "dw1.weight",
    "pro": "token_ca.token_dict",
    "photo": "norm.scale",
    "realtime": "scale.gamma",
}
# Files hold the fixed path too, some in half precision.
_BASE = {"base.sharp.kernel": SHARP, "base.blur.kernel": BLUR}
_NEAR = 1e-3


class _Group(nn.Module):
    """Sequence of blocks, named as in the checkpoints."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ParagonTier(nn.Module):
    """Magic Kernel upsampling plus a learned detail path, in one of four tiers.

    Maps (B, C, H, W) in 0..1 to (B, C, H * scale, W * scale), unclamped. In `pro` every pixel
    depends on the whole image, by channel attention; in `photo` pixels of opposite borders depend
    on each other (`ShiftedWindowAttention`).
    """

    def __init__(self, config: TierConfig) -> None:
        super().__init__()
        self.config = config
        width, scale = config.features, config.scale
        self.base = MagicKernelUpsample(config.channels, scale, config.alpha)
        self.conv_in = nn.Conv2d(config.channels, width, 3, padding=1)
        self.body = nn.Sequential(
            *(
                _Group(
                    [
                        _block(config, group * config.blocks + place)
                        for place in range(config.blocks)
                    ]
                )
                for group in range(config.groups)
            )
        )
        self.conv_mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Sequential(
            nn.Conv2d(width, width * scale**2, 3, padding=1), nn.PixelShuffle(scale)
        )
        self.conv_out = nn.Conv2d(width, config.channels, 3, padding=1)
        self.detail_gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to (B, C, H * scale, W * scale), unclamped."""
        detail = self.conv_out(self.up(self.conv_mid(self.body(self.conv_in(x)))))
        return self.base(x) + detail * self.detail_gain


def _block(config: TierConfig, index: int) -> nn.Module:
    shift = config.window // 2 * (index % 2)
    match config.tier:
        case "realtime":
            return RealtimeBlock(config.features)
        case "stream":
            return StreamBlock(config.features)
        case "photo":
            return PhotoBlock(config.features, config.window, shift, config.attention)
        case "pro":
            return ProBlock(config.features, config.window, shift, config.attention)


def is_tier_checkpoint(names: Collection[str]) -> bool:
    """Return whether the tensors of a ParagonSR2 tier have these names."""
    return (
        "detail_gain" in names
        and all(f"{name}.weight" in names for name in _REQUIRED_LAYERS)
        and any(_BLOCK + sign in names for sign in _TIER_KEYS.values())
    )


def load_tier(
    path: Path, name: str, digest: str, state: Mapping[str, Tensor]
) -> tuple[ParagonTier, ModelDescriptor]:
    """Build a tier's network (fp32, on the CPU) and descriptor from a checkpoint.

    ``state`` must satisfy `is_tier_checkpoint`; `infer_tier_config` says which shapes count.
    Sharpening of the fixed path and window size are not in the file: they are those of the tier.
    Raises ModelError for tensors that do not fit together.
    """
    config = infer_tier_config(path, state)
    network = ParagonTier(config)
    _check_base(path, state)
    learned = {key: value for key, value in state.items() if not key.startswith("base.")}
    try:
        network.load_state_dict(learned)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"{path} looks like {FAMILY} ({config.tier}), but its tensors do not fit:"
            f" {lines[-1].strip()}"
        ) from error
    # In `pro`, and with windows that wrap around the image, every pixel may depend on all others.
    everywhere = config.tier == "pro" or config.attention
    return network, ModelDescriptor(
        name=name,
        architecture=FAMILY,
        purpose="SR" if config.scale > 1 else "Restoration",
        scale=config.scale,
        in_channels=config.channels,
        out_channels=config.channels,
        supports_half=True,
        supports_bfloat16=True,
        tiling="discouraged" if everywhere else "supported",
        tags=(config.tier, f"{config.features}nf", f"{config.groups}x{config.blocks}"),
        sha256=digest,
        path=str(path),
    )


def infer_tier_config(path: Path, state: Mapping[str, Tensor]) -> TierConfig:
    """Infer the configuration from the names and shapes of a tier's state dict.

    Features and channels come from the first convolution's weight, (features, C, 3, 3), the scale
    from that of the last one before the pixel shuffle, (features * scale**2, features, 3, 3).
    Raises ModelError for a scale that is not an integer, or channels other than 1 or 3.
    """
    tiers: list[Tier] = [tier for tier, sign in _TIER_KEYS.items() if _BLOCK + sign in state]
    tier = tiers[0]
    features, channels = state["conv_in.weight"].shape[:2]
    scale = math.isqrt(len(state["up.0.weight"]) // features)
    if scale * scale * features != len(state["up.0.weight"]) or channels not in (1, 3):
        raise ModelError(f"{path} looks like {FAMILY} ({tier}), but its scale is not an integer")
    places = {tuple(map(int, key.split(".")[1:4:2])) for key in state if key.startswith("body.")}
    groups, blocks = (1 + max(place[axis] for place in places) for axis in (0, 1))
    attention = any(".qkv." in key for key in state)
    return replace(
        TierConfig.of(tier, scale),
        channels=channels,
        features=features,
        groups=groups,
        blocks=blocks,
        attention=attention,
    )


def _check_base(path: Path, state: Mapping[str, Tensor]) -> None:
    for key, taps in _BASE.items():
        kernel = state.get(key)
        if kernel is None:
            continue
        wanted = torch.tensor(taps)
        if kernel.shape != wanted.shape or (kernel.float() - wanted).abs().max() > _NEAR:
            raise ModelError(f"{path} looks like {FAMILY}, but its fixed path has other filters")
