"""Files of a VideoVAE: a folder as diffusers writes it, or a single .safetensors file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import ModelError
from lowtide.core.input_file import exists, is_folder, require_input
from lowtide.models.lowtide_files import (
    ARCHITECTURE,
    CONFIG,
    misfit,
    read_metadata,
    read_tensors,
    write_tensors,
)
from lowtide.models.video_vae.config import CLASS_NAME, VideoVAEConfig

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_HINT = "name a folder that VideoVAE.save wrote, or SeedVR2's ema_vae_fp16.safetensors"


def write_model(path: Path, config: VideoVAEConfig, state: Mapping[str, Tensor]) -> None:
    """Write weights and configuration to a folder, or to a .safetensors file alone."""
    is_file = path.suffix == ".safetensors"
    described = {ARCHITECTURE: CLASS_NAME, CONFIG: config.to_json()}
    write_tensors(path if is_file else path / WEIGHTS_NAME, state, described)
    if not is_file:
        with atomic_output(path / CONFIG_NAME) as part:
            part.write_text(config.to_json())


def read_model(path: Path) -> tuple[VideoVAEConfig, dict[str, Tensor]]:
    """Read what `write_model` wrote, or a file with the names of SeedVR2's."""
    weights = path / WEIGHTS_NAME if is_folder(path) else path
    for file in (weights, path / CONFIG_NAME)[: 1 + is_folder(path)]:
        if not exists(file):
            raise ModelError(f"{path} is no {CLASS_NAME}: there is no {file.name}", hint=_HINT)
        require_input(file, ModelError)
    if weights.suffix != ".safetensors":
        raise ModelError(f"{weights} is no .safetensors file", hint=_HINT)
    state = read_tensors(weights)
    if is_folder(path):
        sizes = path / CONFIG_NAME
        return VideoVAEConfig.parse(sizes, sizes.read_text(errors="replace")), state
    if (text := read_metadata(weights).get(CONFIG)) is not None:
        return VideoVAEConfig.parse(path, text), state
    return _sizes(path, state), state


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Give a model on the meta device these tensors, as float32.

    Raises `ModelError` where they do not fit.
    """
    if (wrong := misfit(model, state)) is not None:
        flat = not any(one.dim() == 5 for one in state.values())
        raise ModelError(
            f"the tensors in {path} do not fit: {wrong}",
            hint="it is of an image model, which knows no frames" if flat else None,
        )
    model.load_state_dict({name: one.float() for name, one in state.items()}, assign=True)


def _sizes(path: Path, state: Mapping[str, Tensor]) -> VideoVAEConfig:
    """Return the sizes that the tensors of a file without a configuration have."""
    if not {"encoder.conv_in.weight", "decoder.conv_in.weight"} <= set(state):
        raise ModelError(f"{path} is no {CLASS_NAME}: its tensors have other names", hint=_HINT)
    names = [f"encoder.down_blocks.{level}.resnets.0.conv1.weight" for level in range(4)]
    layers = {
        int(found[1]) + 1
        for name in state
        if (found := re.match(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", name))
    }
    if not layers or not set(names) <= set(state):
        raise ModelError(
            f"{path} is no {CLASS_NAME}: levels of its encoder are missing", hint=_HINT
        )
    return VideoVAEConfig.checked(
        path,
        {
            "block_out_channels": [state[name].shape[0] for name in names],
            "latent_channels": state["decoder.conv_in.weight"].shape[1],
            "layers_per_block": max(layers),
        },
    )
