"""Pretrained backbone weights, read from local files; nothing is downloaded."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lowtide.core.errors import UsageError


def read_tensors(path: Path, what: str, hint: str) -> dict[str, Tensor]:
    """Return the tensors of a .pth or .safetensors file on the CPU.

    No code of the file is run. ``what`` names the weights in messages. Raises UsageError with
    ``hint`` for other files, and for those that hold no state dict.
    """
    suffix = path.suffix.lower()
    if suffix not in (".pth", ".safetensors"):
        raise UsageError(f"{what} must be a .pth or .safetensors file, not {path}", hint=hint)
    if not path.is_file():
        raise UsageError(f"there is no file with {what} at {path}", hint=hint)
    try:
        if suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
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
    found: Mapping[str, Tensor], needed: Mapping[str, Tensor], path: Path, network: str, hint: str
) -> dict[str, Tensor]:
    """Return the tensors of ``found`` that ``network``'s features need, in fp32.

    Names in ``found`` may have the prefix ``features.``. Raises UsageError naming tensors that
    are missing or have another shape than in ``needed``.
    """
    named = {name.removeprefix("features."): tensor for name, tensor in found.items()}
    wrong = [f"no {name}" for name in needed if name not in named]
    wrong += [
        f"{name} of shape {tuple(named[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in needed.items()
        if name in named and named[name].shape != tensor.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UsageError(
            f"{path} does not match {network}: it has {', '.join(wrong[:4])}{more}", hint=hint
        )
    return {name: named[name].float() for name in needed}
