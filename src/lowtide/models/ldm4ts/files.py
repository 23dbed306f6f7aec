"""Files of an LDM4TS model: weights as safetensors, and its configuration as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import ModelError, UsageError
from lowtide.core.input_file import exists, require_input
from lowtide.models.ldm4ts.config import LDM4TSConfig
from lowtide.models.ldm4ts.family import NAME
from lowtide.models.lowtide_files import ARCHITECTURE, misfit, read_tensors, write_tensors
from lowtide.models.model_files import first_problem, parse_json

_NAME = "ldm4ts"


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
    values = parse_json(sizes, _NAME, sizes.read_text(errors="replace"))
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
    if (wrong := misfit(model, state)) is not None:
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
    weights = path if path.suffix == ".safetensors" else path / f"{_NAME}.safetensors"
    return weights, weights.with_suffix(".json")
