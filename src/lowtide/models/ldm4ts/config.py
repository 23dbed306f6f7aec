"""Configuration of LDM4TS, and its files; without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists, require_input
from lowtide.core.option import MOST_SEED
from lowtide.models.lowtide_files import ARCHITECTURE, first_misfit, read_tensors, write_tensors
from lowtide.models.model_files import first_problem, parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn


_LARGEST_SIDE = 4096
Backend = Literal["default", "sdpa", "flash", "sage"]

NAME, _STEM = "LDM4TS", "ldm4ts"


class LDM4TSConfig(BaseModel, frozen=True, extra="forbid"):
    """Sizes and parts of an `LDM4TSModel`.

    Attributes:
        image_size: Height and width of the path image, in pixels.
        horizons: Steps ahead that are asked for; paths are as long as the longest.
        diffusion_steps: Noise levels in training; they cost no memory.
        attention_backend: Attention of the U-Net.
        attention_tokens: Pixels that a level of the U-Net has at most to attend to itself; 0 for no
            attention, 784 for all levels of images of 224×224.
        head_dim: Channels of an attention head. SageAttention takes 64, 96 and 128.
        gradient_checkpointing: Recompute activations in the backward pass.
        look_back: Steps that a forecast sees, L.
        variables: Series that are forecast together, D.
        period: Steps of a season, the length of a row of folded images.
        autoencoder: Folder of a diffusers ``AutoencoderKL``; None for the closed-form one.
        latent_channels: Channels of the closed-form latent at most; short paths need fewer.
        width: Channels of the U-Net at latent resolution.
        views: Whether images of the look-back are a condition.
        frequency: Whether its spectrum is one.
        temporal: Whether the raw series is one, by a transformer of patches.
        diffusion: Whether the denoiser is used; without it latents are those of the fitted
            Gaussian.
        sampling_steps: Steps of the sampler.
        seed: Seed of the initial weights.
    """

    image_size: tuple[int, int] = (64, 64)
    horizons: tuple[int, ...] = Field(default=(96,), min_length=1)
    diffusion_steps: int = Field(default=1000, ge=2, le=100_000)
    attention_backend: Backend = "default"
    attention_tokens: int = Field(default=64, ge=0, le=784)
    head_dim: int = Field(default=64, ge=8, le=256)
    gradient_checkpointing: bool = False
    look_back: int = Field(default=336, ge=2)
    variables: int = Field(default=1, ge=1)
    period: int = Field(default=24, ge=1, le=100_000)
    autoencoder: Path | None = None
    latent_channels: int = Field(default=4, ge=1)
    width: int = Field(default=32, ge=8)
    views: bool = True
    frequency: bool = True
    temporal: bool = True
    diffusion: bool = True
    sampling_steps: int = Field(default=10, ge=1, le=100_000)
    seed: int = Field(default=0, ge=0, le=MOST_SEED)

    @field_validator("image_size")
    @classmethod
    def _check_image_size(cls, value: tuple[int, int]) -> tuple[int, int]:
        if any(side < 16 or side % 8 or side > _LARGEST_SIDE for side in value):
            raise ValueError(f"sides must be multiples of 8, from 16 to {_LARGEST_SIDE:,}")
        return value

    @field_validator("horizons")
    @classmethod
    def _check_horizons(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError("horizons must be at least 1")
        return value

    @property
    def horizon(self) -> int:
        """Steps of a path: the longest of the horizons."""
        return max(self.horizons)


def write_model(path: Path, config: LDM4TSConfig, state: Mapping[str, Tensor]) -> None:
    """Write weights and configuration to a folder, or to a .safetensors file and beside it."""
    weights, sizes = _files(path)
    write_tensors(weights, state, {ARCHITECTURE: NAME})
    with atomic_output(sizes) as part:
        part.write_text(config.model_dump_json(indent=2) + "\n")


def read_model(path: Path) -> tuple[LDM4TSConfig, dict[str, Tensor]]:
    """Read what `write_model` wrote; raises `ModelError` if it is no LDM4TS model."""
    weights, sizes = _files(path)
    for file in (weights, sizes):
        if not exists(file):
            raise ModelError(
                f"{path} is no LDM4TS model: there is no {file.name}",
                hint="name the folder that LDM4TSModel.save wrote",
            )
        require_input(file, ModelError)
    values = parse_json(sizes, _STEM, sizes.read_text(errors="replace"))
    if isinstance(values, dict):
        values.setdefault("head_dim", 32)  # as heads were before this was stored
    try:
        config = LDM4TSConfig.model_validate(values)
    except ValidationError as error:
        raise ModelError(
            f"{sizes} is no configuration of LDM4TS: {first_problem(error)}"
        ) from error
    return config, read_tensors(weights)


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load the tensors that `read_model` returned; raises `ModelError` where they do not fit."""
    if (wrong := first_misfit(model, state)) is not None:
        raise ModelError(f"the tensors in {path} do not fit its configuration: {wrong}")
    model.load_state_dict(state)


def make_config(**values: Any) -> LDM4TSConfig:
    """Return a configuration; raises `UsageError` with the name of a field that is wrong."""
    try:
        return LDM4TSConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(
            f"LDM4TS: {first_problem(error)}",
            hint=f"fields: {', '.join(LDM4TSConfig.model_fields)}",
        ) from error


def _files(path: Path) -> tuple[Path, Path]:
    """Return the files of weights and configuration of a model at ``path``."""
    weights = path if path.suffix == ".safetensors" else path / f"{_STEM}.safetensors"
    return weights, weights.with_suffix(".json")
