"""Generators and discriminators by their ``type`` in a training configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import ModelError, UsageError, hint_for_name
from lowtide.models import lowtide_files
from lowtide.models.munet import MUNet, MUNetConfig
from lowtide.models.paragonsr2.conv_config import ParagonConvConfig
from lowtide.models.paragonsr2.tiers import ParagonTier, Tier, TierConfig
from lowtide.models.paragonsr2.variant_config import VARIANTS, VariantConfig
from lowtide.training.limited_build import limited_build

_TIERS: tuple[Tier, ...] = ("realtime", "stream", "photo", "pro")
_VARIANT_PREFIX, _CONV, _MUNET = "paragonsr2_", "paragonconv", "munet"
GENERATORS = (_CONV, *(_VARIANT_PREFIX + name for name in (*VARIANTS, *_TIERS)))


def make_generator(config: Mapping[str, Any], scale: int, seed: int) -> nn.Module:
    """Build the generator of ``network_g`` with weights initialized from ``seed``.

    Args:
        config: The entries of ``network_g``: ``type`` and the options of that type.
        scale: Upscaling factor.
        seed: Seed of ``torch.manual_seed``.

    Raises:
        UsageError: For an unknown type, with the nearest name, and for options that the type does
            not have.
    """
    options = dict(config)
    kind = str(options.pop("type", "")).lower()
    if kind not in GENERATORS:
        raise _unknown_type("network_g.type", kind, GENERATORS)
    torch.manual_seed(seed)
    try:
        with limited_build("network_g"):
            return _build_generator(kind, scale, options)
    except (TypeError, ModelError) as error:
        raise UsageError(f"network_g ({kind}): {_first_line(error)}") from error


def _build_generator(kind: str, scale: int, options: dict[str, Any]) -> nn.Module:
    if kind == _CONV:
        return lowtide_files.build_network(ParagonConvConfig(scale, **options))
    name: Any = kind.removeprefix(_VARIANT_PREFIX)
    if name in VARIANTS:
        return lowtide_files.build_network(VariantConfig.of(name, scale, **options))
    return ParagonTier(replace(TierConfig.of(name, scale), **options))


def make_discriminator(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Build the discriminator of ``network_d``; raises as `make_generator`.

    The seed is ``seed + 1``, so that its weights are not those drawn for the generator.
    """
    options = dict(config)
    kind = str(options.pop("type", "")).lower()
    if kind != _MUNET:
        raise _unknown_type("network_d.type", kind, (_MUNET,))
    torch.manual_seed(seed + 1)
    try:
        with limited_build("network_d"):
            return MUNet(MUNetConfig.from_dict(options))
    except (TypeError, ModelError) as error:
        raise UsageError(f"network_d ({kind}): {_first_line(error)}") from error


def load_pretrained(network: nn.Module, path: Path, *, strict: bool) -> list[str]:
    """Load ``path``'s weights into the generator and return the names not loaded.

    Weights with those names keep their random values. Unless ``strict``, weights of another shape
    are skipped.

    Raises:
        UsageError: If ``strict`` and the weights are those of another network, or if none fits.
    """
    from lowtide.models.loader import load

    try:
        source = load(path).module.state_dict()
    except ModelError as error:
        raise UsageError(f"path.pretrain_network_g: {error.message}") from error
    target = network.state_dict()
    matched = {
        name: weight
        for name, weight in source.items()
        if name in target and target[name].shape == weight.shape
    }
    unmatched = [name for name in target if name not in matched]
    if (strict and (unmatched or len(matched) < len(source))) or not matched:
        raise UsageError(
            f"path.pretrain_network_g: {path} has weights of another network: {len(matched)} of"
            f" {len(target)} tensors match",
            hint="use the same network_g, or strict_load_g: false to load those that match",
        )
    network.load_state_dict({**target, **matched})
    return unmatched


def _unknown_type(place: str, kind: str, known: tuple[str, ...]) -> UsageError:
    return UsageError(f"{place}: {kind!r} is not known", hint=hint_for_name(kind, known))


def _first_line(error: Exception) -> str:
    return getattr(error, "message", None) or str(error).splitlines()[0]
