"""Trained weights as safetensors files with metadata of their architecture."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowtide.models import lowtide_files
from lowtide.training.run_config import RunConfig


def save_weights(path: Path, network: nn.Module, config: RunConfig) -> Path:
    """Write ``network`` as a safetensors file for `lowtide.load`, and return the path.

    The metadata say of which configuration it is, where its family writes one. Raises
    `OutputError`.
    """
    entries = {"lowtide.trained_as": config.name, "lowtide.seed": str(config.manual_seed)}
    entries |= lowtide_files.metadata_for(getattr(network, "config", None))
    lowtide_files.write_tensors(path, network.state_dict(), entries)
    return path
