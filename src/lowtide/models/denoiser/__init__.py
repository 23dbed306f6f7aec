"""Denoiser: a slim U-Net that is given the noise level, and what runs it in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.models.denoiser.config import FiniteDenoiserConfig, SlimUNetConfig
from lowtide.models.families import Architecture, ModelFamily

if TYPE_CHECKING:
    from torch import nn


def _leveled(config: SlimUNetConfig) -> nn.Module:
    from lowtide.models.denoiser.denoiser import Denoiser

    return Denoiser(config)


def _finite(config: FiniteDenoiserConfig) -> nn.Module:
    from lowtide.models.denoiser.finite_denoiser import FiniteDenoiser

    return FiniteDenoiser(config)


FAMILY = ModelFamily(
    name="Denoiser",
    architectures={
        "SlimUNet": Architecture(SlimUNetConfig, _leveled, "discouraged"),
        "FiniteDenoiser": Architecture(FiniteDenoiserConfig, _finite, "supported"),
    },
)
