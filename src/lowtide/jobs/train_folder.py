"""Output folder of a training run: new, or of an earlier run of the same name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lowtide.core.atomic_file import atomic_output, make_folder, remove_part_files
from lowtide.core.errors import UsageError
from lowtide.training.run_config import RunConfig

_CONFIG = "config.json"
# Files that a training run makes in its folder, in addition to the weights named after it.
_MADE = (
    _CONFIG,
    "log.jsonl",
    "models",
    "tensorboard",
    "training_states",
    "validation",
    "visualization",
)


def require_own_folder(folder: Path, name: str) -> None:
    """Raise `UsageError` if training ``name`` would overwrite files of another origin."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="use another name, or move it away")
    if _is_run_folder(folder, name):
        return
    for made in (f"{name}.safetensors", *_MADE):
        if os.path.lexists(folder / made):
            raise UsageError(
                f"{folder / made} already exists and is not from a training run of this name",
                hint="use another name or -o FOLDER, or move it away",
            )


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration that marks ``folder`` as a training run's.

    Removes what a killed run left unfinished.

    Raises:
        OutputError: A file cannot be written.
    """
    make_folder(folder)
    best = f"models/{config.name}_best.safetensors"
    for made in (_CONFIG, f"{config.name}.safetensors", best, "models/validated.safetensors"):
        remove_part_files(folder / made)
    with atomic_output(folder / _CONFIG) as part:
        part.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n")


def _is_run_folder(folder: Path, name: str) -> bool:
    """Return whether a training run began in the folder: a config or a state is there."""
    config = folder / _CONFIG
    try:
        known = json.loads(config.read_bytes()) if config.is_file() else None
    except (OSError, ValueError, RecursionError):
        known = None
    if isinstance(known, dict) and known.get("name") == name and "train" in known:
        return True
    return any(path.stem.isdigit() for path in folder.glob("training_states/*.state"))
