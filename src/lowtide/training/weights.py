"""Trained weights as safetensors files with metadata of their architecture."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowtide.models import lowtide_files
from lowtide.models.denoiser.slim_unet_config import SlimUNetConfig
from lowtide.models.paragonsr2.conv_config import ParagonConvConfig
from lowtide.models.paragonsr2.tiers import ParagonTier
from lowtide.models.paragonsr2.variant_config import VariantConfig
from lowtide.training.run_config import RunConfig


def save_weights(path: Path, network: nn.Module, config: RunConfig) -> Path:
    """Write ``network`` as a safetensors file for `lowtide.load`, and return the path.

    A `ParagonTier` is written as its author does, without the architecture in the metadata: its
    tensor names suffice. Raises `OutputError`.
    """
    entries = {"lowtide.trained_as": config.name, "lowtide.seed": str(config.manual_seed)}
    architecture = getattr(network, "config", None)
    if isinstance(architecture, ParagonConvConfig | VariantConfig | SlimUNetConfig):
        entries |= lowtide_files.metadata_for(architecture)
    else:
        assert isinstance(network, ParagonTier)
    lowtide_files.write_tensors(path, network.state_dict(), entries)
    return path
