"""Configuration of the published ParagonSR2 tiers, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["realtime", "stream", "photo", "pro"]


@dataclass(frozen=True)
class TierConfig:
    """Tier, scale and size of a `ParagonTier`.

    ``features`` channels in ``groups`` of ``blocks`` each; ``alpha`` is how much the fixed path
    sharpens. ``window`` is the side of attention windows, in pixels; without ``attention`` the
    blocks of `photo` and `pro` leave it out.
    """

    tier: Tier
    scale: int
    channels: int = 3
    features: int = 64
    groups: int = 4
    blocks: int = 4
    alpha: float = 0.4
    window: int = 16
    attention: bool = True

    @classmethod
    def of(cls, tier: Tier, scale: int) -> TierConfig:
        """Return the configuration that the tier's author trains."""
        features, groups, blocks, alpha = _SHAPES[tier]
        return cls(
            tier,
            scale,
            features=features,
            groups=groups,
            blocks=blocks,
            alpha=alpha,
            attention=tier in ("photo", "pro"),
        )


# Features, groups, blocks per group, alpha: the public repository Phhofm/ParagonSR2.
_SHAPES: dict[Tier, tuple[int, int, int, float]] = {
    "realtime": (16, 1, 3, 0.3),
    "stream": (32, 2, 3, 0.0),
    "photo": (64, 4, 4, 0.4),
    "pro": (64, 6, 6, 0.4),
}
