"""ParagonSR2 super-resolution: fixed upsampling plus a learned detail path.

The fixed path always keeps the low frequencies right. After Philip Hofmann's ParagonSR2
(github.com/Phhofm/ParagonSR2). `FAMILY` says how its files are known and what trainings call its
networks, `config` holds sizes, both without PyTorch; `paragon_conv` is the purely convolutional
model, `tiers` the published tiers, `variant` the variants from nano to xl, and `munet` the
discriminator of their GAN training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.families import Architecture, ModelFamily
from lowtide.models.paragonsr2.config import (
    TIERS,
    VARIANTS,
    ParagonConvConfig,
    Tier,
    TierConfig,
    Variant,
    VariantConfig,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from lowtide.models.ncnn_graph import NcnnGraph


def _recognizes(names: Collection[str]) -> bool:
    from lowtide.models.paragonsr2.tiers import is_tier_checkpoint

    return is_tier_checkpoint(names)


def _load(
    path: Path, name: str, digest: str, state: Mapping[str, Tensor]
) -> tuple[nn.Module, ModelDescriptor]:
    from lowtide.models.paragonsr2.tiers import load_tier

    return load_tier(path, name, digest, state)


def _conv(config: ParagonConvConfig) -> nn.Module:
    from lowtide.models.paragonsr2.paragon_conv import ParagonConv

    return ParagonConv(config)


def _conv_graph(config: ParagonConvConfig, tensors: Mapping[str, np.ndarray]) -> NcnnGraph:
    from lowtide.models.paragonsr2.paragon_conv_graph import paragon_conv_graph

    return paragon_conv_graph(config, tensors)


def _variant(config: VariantConfig) -> nn.Module:
    from lowtide.models.paragonsr2.variant import ParagonVariant

    return ParagonVariant(config)


def _named_variant(name: Variant, scale: int, **options: Any) -> nn.Module:
    return _variant(VariantConfig.of(name, scale, **options))


def _tier(name: Tier, scale: int, **options: Any) -> nn.Module:
    from lowtide.models.paragonsr2.tiers import ParagonTier

    return ParagonTier(replace(TierConfig.of(name, scale), **options))


def _munet(**options: Any) -> nn.Module:
    from lowtide.models.paragonsr2.munet import MUNet, MUNetConfig

    return MUNet(MUNetConfig.from_dict(options))


def _generators() -> dict[str, Callable[..., nn.Module]]:
    return {
        **{f"paragonsr2_{name}": partial(_named_variant, name) for name in VARIANTS},
        **{f"paragonsr2_{name}": partial(_tier, name) for name in TIERS},
        "paragonconv": lambda scale, **options: _conv(ParagonConvConfig(scale, **options)),
    }


FAMILY = ModelFamily(
    name="ParagonSR2",
    architectures={
        "ParagonConv": Architecture(ParagonConvConfig, _conv, "supported", _conv_graph),
        "ParagonSR2": Architecture(VariantConfig, _variant, "discouraged"),
    },
    recognizes=_recognizes,
    load=_load,
    generators=_generators(),
    discriminators={"munet": _munet},
)
