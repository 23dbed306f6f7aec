"""Pretrained backbone weights, read from local files; nothing is downloaded."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists, require_input
from lowtide.models import lowtide_files


def read_tensors(path: Path, what: str, hint: str) -> dict[str, Tensor]:
    """Return the tensors of a .pth or .safetensors file, of any shape, on the CPU.

    No code of the file is run. ``what`` names the weights in messages. Raises UsageError with
    ``hint`` for other files, and for those that hold no state dict.
    """
    suffix = path.suffix.lower()
    if suffix not in (".pth", ".safetensors"):
        raise UsageError(f"{what} must be a .pth or .safetensors file, not {path}", hint=hint)
    if not exists(path):
        raise UsageError(f"there is no file with {what} at {path}", hint=hint)
    require_input(path, UsageError, hint=hint)
    try:
        if suffix == ".safetensors":
            return lowtide_files.read_tensors(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ModelError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} cannot be read: {reason}", hint=hint) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} contains a {type(found).__name__}, not a state dict", hint=hint)
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def select_features(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    network: str,
    hint: str,
) -> dict[str, Tensor]:
    """Return the tensors of ``tensors`` that ``network``'s features need, in fp32.

    Names in ``tensors`` may have the prefix ``features.``. The result has the names and shapes of
    ``expected``, (out channels, C, height, width) for convolutions. Raises UsageError naming
    tensors that are missing or have another shape.
    """
    by_name = {name.removeprefix("features."): tensor for name, tensor in tensors.items()}
    mismatches = [f"no {name}" for name in expected if name not in by_name]
    mismatches += [
        f"{name} of shape {tuple(by_name[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in by_name and by_name[name].shape != tensor.shape
    ]
    if mismatches:
        more = f" and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
        raise UsageError(
            f"{path} does not match {network}: it has {', '.join(mismatches[:4])}{more}", hint=hint
        )
    return {name: by_name[name].float() for name in expected}
