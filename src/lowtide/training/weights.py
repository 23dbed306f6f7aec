"""Trained weights as safetensors files with metadata of their architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from lowtide.core.atomic_file import atomic_output, make_folder
from lowtide.models import lowtide_files
from lowtide.models.denoiser.slim_unet_config import SlimUNetConfig
from lowtide.models.paragonsr2.conv_config import ParagonConvConfig
from lowtide.models.paragonsr2.tiers import ParagonTier
from lowtide.models.paragonsr2.variant_config import VariantConfig
from lowtide.training.run_config import RunConfig

_METADATA_KEY = "__metadata__"


def save_weights(path: Path, network: nn.Module, config: RunConfig) -> Path:
    """Write ``network`` as a safetensors file for `lowtide.load`, and return the path.

    A `ParagonTier` is written as its author does, without the architecture in the metadata: its
    tensor names suffice. Raises `OutputError`.
    """
    from safetensors.torch import save_file

    entries = {"lowtide.trained_as": config.name, "lowtide.seed": str(config.manual_seed)}
    architecture = getattr(network, "config", None)
    if isinstance(architecture, ParagonConvConfig | VariantConfig | SlimUNetConfig):
        entries |= lowtide_files.metadata_for(architecture)
    else:
        assert isinstance(network, ParagonTier)
    make_folder(path.parent)
    with atomic_output(path) as part:
        save_file(_contiguous_on_cpu(network.state_dict()), part, entries)
        _sort_metadata(part)
    return path


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file in place.

    safetensors writes it in another order each time; sorted, the same weights give the same bytes.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header = {_METADATA_KEY: dict(sorted(header.pop(_METADATA_KEY).items())), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) == size:
            file.seek(8)
            file.write(text)


def _contiguous_on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict contiguous on the CPU, as safetensors requires."""
    return {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
