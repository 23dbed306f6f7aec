"""Facts about a model by its name or file, without building its network and without PyTorch."""

from __future__ import annotations

from pathlib import Path

from lowtide.core.errors import ModelError
from lowtide.core.input_file import expand_home
from lowtide.models import bundled, lowtide_files
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.model_files import require_model_file, sha256_of


def describe_model(name_or_path: str | Path) -> ModelDescriptor | None:
    """Return the descriptor of a bundled model, or of a file that says in its metadata what it is.

    None for other files: what they are shows when PyTorch builds them.

    Raises:
        ModelError: The name is unknown or the file is missing or damaged.
    """
    path = expand_home(Path(name_or_path), ModelError)
    name = str(name_or_path)
    if name in bundled.bundled_names() or is_name(name_or_path, path):
        return bundled.describe_bundled(name)
    require_model_file(path)
    entries = lowtide_files.read_metadata(path) if path.suffix.lower() == ".safetensors" else {}
    if lowtide_files.ARCHITECTURE not in entries:
        return None
    return lowtide_files.describe_file(path, entries, path.stem, sha256_of(path))


def is_name(given: str | Path, path: Path) -> bool:
    """Return whether this is a (misspelled) name, not a file: a word without a suffix."""
    return isinstance(given, str) and path.name == given and not path.suffix
