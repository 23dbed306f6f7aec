"""A denoiser and another model as one network, which an engine streams as one."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import get_args

from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import SizeRule, Tiling
from lowtide.models.loaded_model import Model


class DenoisedFirst(nn.Module):
    """Two networks in a row: (B, C, H, W) in 0..1 denoised, and what the second makes of it."""

    def __init__(self, denoiser: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.network = denoiser, network

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to the second network's (B, C', H * scale, W * scale)."""
        return self.network(self.denoiser(image).clamp(0, 1))


def denoised_first(denoiser: Model, model: Model) -> Model:
    """Return ``model`` of what ``denoiser`` makes of an image, as one model.

    Raises:
        ModelError: It does not take the denoiser's channels.
    """
    first, second = denoiser.descriptor, model.descriptor
    if first.out_channels != second.in_channels:
        raise ModelError(
            f"{second.name} takes {second.in_channels} channels, and {first.name} makes"
            f" {first.out_channels}",
            hint="denoise first: lowtide denoise INPUT -o OUTPUT",
        )
    sizes = first.size, second.size
    both = replace(
        second,
        name=f"{second.name} after {first.name}",
        size=SizeRule(
            max(one.minimum for one in sizes),
            math.lcm(*(one.multiple_of for one in sizes)),
            any(one.square for one in sizes),
        ),
        supports_half=first.supports_half and second.supports_half,
        supports_bfloat16=first.supports_bfloat16 and second.supports_bfloat16,
        sha256=hashlib.sha256(f"{first.sha256} {second.sha256}".encode()).hexdigest(),
        tiling=max((one.tiling for one in (first, second)), key=get_args(Tiling).index),
        path=None,
    )
    return Model(DenoisedFirst(denoiser.module, model.module), both)
