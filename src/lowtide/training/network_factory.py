"""Generators and discriminators by their ``type`` in a training configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import ModelError, UsageError, hint_for_name
from lowtide.models.families import Role, networks
from lowtide.training.limited_build import limited_build


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
    return _make("network_g", "generators", config, seed, scale=scale)


def make_discriminator(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Build the discriminator of ``network_d``; raises as `make_generator`.

    The seed is ``seed + 1``, so that its weights are not those drawn for the generator.
    """
    return _make("network_d", "discriminators", config, seed + 1)


def _make(
    section: str, role: Role, config: Mapping[str, Any], seed: int, **given: int
) -> nn.Module:
    known, options = networks(role), dict(config)
    kind = str(options.pop("type", "")).lower()
    if kind not in known:
        raise UsageError(
            f"{section}.type: {kind!r} is not known", hint=hint_for_name(kind, tuple(known))
        )
    torch.manual_seed(seed)
    try:
        with limited_build(section):
            return known[kind](**given, **options)
    except (TypeError, ModelError) as error:
        message = getattr(error, "message", None) or str(error).splitlines()[0]
        raise UsageError(f"{section} ({kind}): {message}") from error


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
