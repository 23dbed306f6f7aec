"""Lowtide's own model files: safetensors whose metadata says how to build the model.

``lowtide.architecture`` names the architecture and ``lowtide.config`` holds its shape as JSON,
so that nothing has to be guessed from the names of tensors. `describe` reads the header alone
and imports no PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import ModelError
from lowtide.models.descriptor import ModelDescriptor, SizeRule
from lowtide.models.paragonsr2.config import ParagonConvConfig

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURE = "lowtide.architecture"
CONFIG = "lowtide.config"
# A table once there is a second architecture; its descriptor will differ, too.
PARAGON_CONV = "ParagonConv"


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; ModelError for a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ModelError(
            f"{path} is no safetensors file, or is damaged: {error}",
            hint="download it again, and compare its size with the one stated there",
        ) from error


def describe(path: Path, entries: dict[str, str], name: str, digest: str) -> ModelDescriptor:
    """Facts about a file with `ARCHITECTURE` among its metadata ``entries``.

    Raises ModelError for an architecture this version does not know, or a wrong configuration.
    """
    config = _config(path, entries)
    return ModelDescriptor(
        name=name,
        architecture=PARAGON_CONV,
        purpose="SR" if config.scale > 1 else "Restoration",
        scale=config.scale,
        in_channels=3,
        out_channels=3,
        size=SizeRule(),
        supports_half=True,
        supports_bfloat16=True,
        tiling="supported",
        tags=(f"{config.features}nf", f"{config.blocks}nb"),
        parameters=config.parameters,
        weight_bytes=4 * (config.parameters + config.constants),
        sha256=digest,
        license=None,
        path=str(path),
    )


def build(path: Path, entries: dict[str, str]) -> nn.Module:
    """The network with its weights, in fp32 on the CPU.

    Raises ModelError where the tensors are not those that the configuration asks for.
    """
    from safetensors.torch import load_file

    from lowtide.models.paragonsr2.conv import ParagonConv

    module = ParagonConv(_config(path, entries))
    try:
        module.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ModelError(f"the tensors in {path} do not fit its metadata: {error}") from error
    return module


def _config(path: Path, entries: dict[str, str]) -> ParagonConvConfig:
    if entries[ARCHITECTURE] != PARAGON_CONV:
        raise ModelError(
            f"{path} needs the architecture {entries[ARCHITECTURE]!r}, "
            f"which this version of Lowtide does not have",
            hint="pip install --upgrade lowtide",
        )
    try:
        values: Any = json.loads(entries.get(CONFIG, "null"))
    except json.JSONDecodeError as error:
        raise ModelError(f"the configuration in {path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} has no configuration in its metadata ({CONFIG})")
    return ParagonConvConfig.from_dict(values)
