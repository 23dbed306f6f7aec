"""Loader of published ParagonSR2 checkpoints, recognized by state_dict keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.paragonsr2.magic_kernel import BLUR, SHARP
from lowtide.models.paragonsr2.tiers import ParagonTier, Tier, TierConfig

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


def is_tier_checkpoint(state: Mapping[str, Tensor]) -> bool:
    """Return whether ``state`` is the state dict of a ParagonSR2 tier.

    Only names are read, not the tensors, which may have any shape.
    """
    return (
        "detail_gain" in state
        and all(f"{name}.weight" in state for name in _REQUIRED_LAYERS)
        and any(_BLOCK + sign in state for sign in _TIER_KEYS.values())
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
