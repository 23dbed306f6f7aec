"""Files of video autoencoders: folders of diffusers or of Lowtide, and SeedVR2's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.integrations.clip_autoencoder import ClipAutoencoder
from lowtide.integrations.video_autoencoders.families import VideoFamily, class_names, family_of
from lowtide.memory.budget import Budget
from lowtide.memory.memory_limits import failing_beyond_container
from lowtide.memory.oom import naming_lack_of_memory
from lowtide.memory.profiles import DeviceProfile
from lowtide.models.video_vae.config import CLASS_NAME
from lowtide.models.video_vae.files import CONFIG_NAME, read_model
from lowtide.models.video_vae.video_vae import VideoVAE


def preload_libraries(path: Path) -> None:
    """Import what loading the model of ``path`` takes: before a budget is set, and within a limit.

    Raises:
        ModelError: As `load_clip_autoencoder`.
        UsageError: As `load_clip_autoencoder`.
        OutOfMemoryError: A limit on this process leaves too little.
    """
    if _is_file(path):
        return
    name = _class_name(path)
    if name != CLASS_NAME:
        with failing_beyond_container(), naming_lack_of_memory("diffusers was imported"):
            _diffusers_class(name)


def load_clip_autoencoder(
    path: Path, budget: Budget, *, dtype: torch.dtype = torch.float32, scratch: Path | None = None
) -> ClipAutoencoder:
    """Return the video autoencoder of a folder of diffusers or of Lowtide, or of SeedVR2's file.

    Its weights are of ``dtype``.

    Raises:
        ModelError: There is none, or it is damaged.
        UsageError: It is of a kind that does not run in bands, or diffusers is missing.
    """
    name = CLASS_NAME if _is_file(path) else _class_name(path)
    with failing_beyond_container(), naming_lack_of_memory(f"{path} was loaded"):
        if name == CLASS_NAME:
            module = VideoVAE.load(path).to(dtype)
        else:
            module = _load_diffusers(path, name, dtype)
    module.to(budget.device)
    return ClipAutoencoder(module, _checked_family(module), budget, scratch)


def empty_clip_autoencoder(
    model: str | Path, profile: DeviceProfile, budget: Budget, *, dtype: torch.dtype
) -> ClipAutoencoder:
    """Return a video autoencoder without weights, to plan for a GPU that need not be here.

    Args:
        model: Name of a class, with its default sizes, or a path as of `load_clip_autoencoder`.
        profile: The GPU.
        budget: As of `ClipAutoencoder`.
        dtype: Type that its weights would have.

    Raises:
        ModelError: There is no such model, or it is damaged.
        UsageError: As `load_clip_autoencoder`.
    """
    path = Path(model)
    named = str(model) in class_names()
    name = str(model) if named else CLASS_NAME if _is_file(path) else _class_name(path)
    if name == CLASS_NAME:
        config = None if named else read_model(path)[0]
        with torch.device("meta"):
            module: nn.Module = VideoVAE(config)
    else:
        kind = _diffusers_class(name)
        with torch.device("meta"):
            module = kind() if named else kind.from_config(kind.load_config(path))
    # as of any module: diffusers' own warns of parts in float32, which these have not
    nn.Module.to(module, dtype)
    module.requires_grad_(False).eval()
    return ClipAutoencoder(module, _checked_family(module), budget, profile=profile)


def _checked_family(module: nn.Module) -> VideoFamily:
    family = family_of(type(module))
    assert family is not None
    family.check(module)
    return family


def _is_file(path: Path) -> bool:
    """Return whether a path is a file, not a folder; raises `ModelError` for what is neither."""
    if exists(path) and not is_folder(path):
        require_input(path, ModelError)
        return True
    return False


def _class_name(path: Path) -> str:
    config = path / CONFIG_NAME
    hint = f"name a folder with a {CONFIG_NAME} of {', '.join(class_names())}, or SeedVR2's file"
    if not exists(config):
        raise ModelError(f"{path} is no video autoencoder: there is no {CONFIG_NAME}", hint=hint)
    require_input(config, ModelError)
    try:
        values = json.loads(config.read_text(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{config} is damaged: {error}", hint=hint) from error
    name = values.get("_class_name") if isinstance(values, dict) else None
    if name not in class_names():
        raise UsageError(
            f"{path} is a {name}, which cannot run in bands of a video",
            hint=f"known are {', '.join(class_names())}",
        )
    return name


def _diffusers_class(name: str) -> Any:
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise UsageError(f"{name} needs diffusers", hint="pip install diffusers") from error
    kind: Any = getattr(diffusers, name, None)
    if kind is None:
        raise UsageError(
            f"this diffusers {diffusers.__version__} has no {name}",
            hint="pip install -U diffusers",
        )
    return kind


def _load_diffusers(path: Path, name: str, dtype: torch.dtype) -> nn.Module:
    kind = _diffusers_class(name)
    try:
        # No pickles, and nothing from the network.
        module = kind.from_pretrained(
            path, local_files_only=True, use_safetensors=True, torch_dtype=dtype
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"the {name} in {path} cannot be read: {error}") from error
    return module.requires_grad_(False).eval()
