"""Configuration of VideoVAE, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from lowtide.core.errors import ModelError, UsageError
from lowtide.models.model_files import first_problem, parse_json

CLASS_NAME = "VideoVAE"
# Pixels and frames per latent along each axis, of four levels of which the last two halve time.
SPACE, TIME = 8, 4


class VideoVAEConfig(BaseModel, frozen=True, extra="forbid"):
    """Sizes of a `VideoVAE`; the defaults are those of SeedVR2's, with 250 million parameters.

    Attributes:
        block_out_channels: Channels of the four levels, from full resolution down.
        latent_channels: Channels of a latent.
        layers_per_block: Residual blocks of a level of the encoder; the decoder has one more.
        norm_num_groups: Groups of all norms, which divide the channels.
        scaling_factor: By what a diffusion model multiplies latents; they are never scaled here.
    """

    block_out_channels: tuple[int, int, int, int] = (128, 256, 512, 512)
    latent_channels: int = Field(default=16, ge=1, le=4096)
    layers_per_block: int = Field(default=2, ge=1, le=64)
    norm_num_groups: int = Field(default=32, ge=1, le=4096)
    scaling_factor: float = Field(default=0.9152, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_widths(self) -> VideoVAEConfig:
        for width in self.block_out_channels:
            if not 0 < width <= 65536 or width % self.norm_num_groups:
                raise ValueError(
                    f"block_out_channels: {self.norm_num_groups} groups do not divide {width}"
                    " channels"
                )
        return self

    @classmethod
    def parse(cls, path: Path, text: str) -> VideoVAEConfig:
        """Read the text of a config.json at ``path``; raises `ModelError` for that of others."""
        values = parse_json(path, CLASS_NAME, text)
        kind = values.pop("_class_name", None) if isinstance(values, dict) else None
        if kind != CLASS_NAME:
            raise ModelError(f"{path} is the configuration of {kind}, not of a {CLASS_NAME}")
        return cls.checked(path, values)

    @classmethod
    def checked(cls, path: Path, values: Mapping[str, Any]) -> VideoVAEConfig:
        """Return the configuration that ``path`` has; raises `ModelError` for wrong values."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ModelError(f"{path} is no {CLASS_NAME}: {first_problem(error)}") from error

    @classmethod
    def of(cls, **values: Any) -> VideoVAEConfig:
        """Return a configuration; raises `UsageError` with the name of a field that is wrong."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UsageError(
                f"{CLASS_NAME}: {first_problem(error)}",
                hint=f"fields: {', '.join(cls.model_fields)}",
            ) from error

    def to_json(self) -> str:
        """Return the text of a config.json, with the name of the class as diffusers writes it."""
        return json.dumps({"_class_name": CLASS_NAME, **self.model_dump()}, indent=2) + "\n"
