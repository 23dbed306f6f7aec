"""Configurations of ParagonConv, and of ParagonSR2's variants and tiers, without PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from lowtide.core.errors import ModelError
from lowtide.models.families import FileConfig

SCALES = (1, 2, 3, 4, 8)
LEAKY_SLOPE = 0.1  # of the activations of a `ParagonConv`

Variant = Literal["nano", "micro", "tiny", "xs", "s", "m", "l", "xl"]
AttentionKind = Literal["window", "hierarchical", "none"]
WindowForm = Literal["halo", "blended"]
Tier = Literal["realtime", "stream", "photo", "pro"]
# Features, groups, blocks per group, expansion, band, alpha, gain, norm, modulation: those of
# traiNNer-redux in delafer's fork, commit 069b6d59 (MIT). Up to s that code halves the groups and
# blocks that it states; these are what it builds.
_SHAPES: dict[Variant, tuple[Any, ...]] = {
    "nano": (12, 1, 1, 1.2, 7, 0.4, 0.05, False, False),
    "micro": (16, 1, 1, 1.5, 7, 0.45, 0.08, False, True),
    "tiny": (24, 1, 1, 1.5, 9, 0.5, 0.1, True, True),
    "xs": (32, 1, 1, 1.8, 11, 0.5, 0.1, True, True),
    "s": (48, 1, 2, 2.0, 11, 0.5, 0.1, True, True),
    "m": (64, 4, 6, 2.0, 11, 0.5, 0.1, True, True),
    "l": (96, 6, 8, 2.0, 13, 0.55, 0.1, True, True),
    "xl": (128, 8, 10, 2.0, 15, 0.6, 0.1, True, True),
}
# In three trainings each, attention gained less than the trainings differ (the benchmark
# ``attention_helps``); s gained more, and m, l and xl have the windows that their author gave them.
_UNHELPED: frozenset[Variant] = frozenset(("nano", "micro", "tiny", "xs"))
VARIANTS: tuple[Variant, ...] = tuple(_SHAPES)
# Features, groups, blocks per group, alpha: the public repository Phhofm/ParagonSR2.
_TIER_SHAPES: dict[Tier, tuple[int, int, int, float]] = {
    "realtime": (16, 1, 3, 0.3),
    "stream": (32, 2, 3, 0.0),
    "photo": (64, 4, 4, 0.4),
    "pro": (64, 6, 6, 0.4),
}
TIERS: tuple[Tier, ...] = tuple(_TIER_SHAPES)


@dataclass(frozen=True)
class ParagonConvConfig(FileConfig):
    """Scale, channels and depth of a `ParagonConv`.

    ``features`` are the channels and ``blocks`` the convolutions of its trunk. Raises ModelError
    for a scale that is not in `SCALES` or a size below 1.
    """

    scale: int
    features: int
    blocks: int

    def __post_init__(self) -> None:
        values = (self.scale, self.features, self.blocks)
        if not all(type(value) is int and value >= 1 for value in values):
            raise ModelError(f"ParagonConv needs integers of at least 1, not {asdict(self)}")
        if self.scale not in SCALES:
            raise ModelError(
                f"ParagonConv upscales by {', '.join(map(str, SCALES))}, not by {self.scale}"
            )

    @property
    def tags(self) -> tuple[str, ...]:
        """Size tags in the usual notation, such as ``64nf`` and ``8nb``."""
        return f"{self.features}nf", f"{self.blocks}nb"

    @property
    def reach(self) -> int:
        """Radius of the receptive field, in input pixels to each side.

        One per 3×3 convolution: first, blocks, last. The cubic path has a radius of 2, so it never
        counts.
        """
        return self.blocks + 2

    @property
    def parameters(self) -> int:
        """Number of learned values."""
        per_output = 9 * self.features + 1
        outputs = self.blocks * self.features + 3 * self.scale**2
        return self.features * (9 * 3 + 1) + outputs * per_output

    @property
    def buffer_elements(self) -> int:
        """Number of values of the fixed path: one dense 5×5 kernel from 3 channels."""
        return 3 * self.scale**2 * 3 * 25


@dataclass(frozen=True)
class VariantConfig(FileConfig):
    """Scale, size and attention of a `ParagonVariant`.

    ``features`` channels in ``groups`` of ``blocks``, widened ``expansion`` times inside a block
    and mixed by depthwise kernels up to ``band`` pixels long. ``alpha`` is how much the fixed path
    sharpens, ``gain`` the factor of the last convolution's initial weights. ``norm`` and
    ``modulation`` are a norm after each block and channel attention. ``attention`` runs in windows
    of ``window`` pixels that share ``shared``, of ``form``.

    Raises ModelError for values that make no network.
    """

    scale: int
    features: int
    groups: int
    blocks: int
    expansion: float = 2.0
    band: int = 11
    alpha: float = 0.5
    gain: float = 0.1
    norm: bool = True
    modulation: bool = True
    attention: AttentionKind = "window"
    form: WindowForm = "halo"
    window: int = 32
    shared: int = 8

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            known = ", ".join(map(str, SCALES))
            raise ModelError(f"ParagonSR2 upscales by {known}, not by {self.scale}")
        for name, least in (("features", 8), ("groups", 1), ("blocks", 1), ("band", 3)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ModelError(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.band % 2 == 0:
            raise ModelError(f"band must be odd, not {self.band}")
        for name, kinds in (("attention", AttentionKind), ("form", WindowForm)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ModelError(f"{name} {getattr(self, name)!r} is not one of {known}")
        if not 0 <= self.alpha <= 1 or not 0 < self.gain <= 1 or self.expansion < 1:
            raise ModelError(
                "alpha must be 0 to 1, gain above 0 and at most 1, expansion at least 1"
            )

    @classmethod
    def of(cls, variant: Variant, scale: int, **changes: Any) -> VariantConfig:
        """Return a variant's configuration with ``changes``.

        Up to xs a variant has no attention unless it is asked for. Raises ModelError for unknown
        names.
        """
        if variant not in _SHAPES:
            raise ModelError(f"{variant!r} is not one of {', '.join(_SHAPES)}")
        attention = "none" if variant in _UNHELPED else "window"
        return replace(cls(scale, *_SHAPES[variant], attention=attention), **changes)

    @property
    def name(self) -> str:
        """Name of the variant with these features and depth, else such as ``64nf``."""
        for variant, (features, groups, blocks, *_) in _SHAPES.items():
            if (features, groups, blocks) == (self.features, self.groups, self.blocks):
                return variant
        return f"{self.features}nf"

    @property
    def tags(self) -> tuple[str, ...]:
        """Variant, size in the usual notation, and attention."""
        size = f"{self.features}nf", f"{self.groups}x{self.blocks}"
        attention_tags = {
            "none": "no attention",
            "window": f"{self.form} windows",
            "hierarchical": "hierarchical attention",
        }
        return *dict.fromkeys((self.name, *size)), attention_tags[self.attention]

    @property
    def buffer_elements(self) -> int:
        """Number of values of the fixed path: sharpening filters, and one per phase."""
        if self.scale == 1:
            return 0
        side = 2 * -(-2 // self.scale) + 1
        return 3 * (49 + self.scale**2 * side**2)

    @property
    def hidden(self) -> int:
        """Channels inside a block."""
        return int(self.features * self.expansion)

    @property
    def depth(self) -> int:
        """Total number of blocks."""
        return self.groups * self.blocks


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
        features, groups, blocks, alpha = _TIER_SHAPES[tier]
        return cls(
            tier,
            scale,
            features=features,
            groups=groups,
            blocks=blocks,
            alpha=alpha,
            attention=tier in ("photo", "pro"),
        )
