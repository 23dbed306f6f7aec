"""Checks of model files on disk: suffixes, first bytes, and limits of untrusted metadata.

Nothing here opens a pickle. A file is judged by its name, type and first bytes, so that every
common mishap (an error page saved under a model's name, a Git LFS pointer, a broken download,
TorchScript) has its own message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import ModelError, short_repr
from lowtide.core.input_file import file_sha256, require_input
from lowtide.models.descriptor import SizeRule

if TYPE_CHECKING:
    from pydantic import ValidationError

SUFFIXES = (".safetensors", ".pth", ".ckpt", ".onnx")
DOWNLOAD_AGAIN = "download it again, and compare its size with the one given at its source"
_HINTS = {
    ".pt": "save its state_dict as .safetensors; most .pt files are TorchScript, a program",
    ".bin": "get the .safetensors file that most repositories offer next to it",
    ".gguf": "get the PyTorch weights (.safetensors or .pth) that it was converted from",
    ".zip": "unpack it and give the model file inside",
}
# Configurations have some hundred characters. The largest side that any known model requires is
# 256: a model that requires more could not be run in tiles, and would take gigabytes.
MOST_CHARACTERS, LARGEST_SIDE = 1 << 16, 1024


def require_model_file(path: Path) -> None:
    """Raise ModelError unless ``path`` is a file that may hold a model."""
    suffix = path.suffix.lower()
    require_input(path, ModelError)
    if suffix not in SUFFIXES:
        raise ModelError(
            f"{path} is not a kind of file that Lowtide loads ({', '.join(SUFFIXES)})",
            hint=_HINTS.get(suffix, "give a model's weights in one of these formats"),
        )
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    _require_content(path, head)


def require_finite(path: Path, tensors: Mapping[str, Any]) -> None:
    """Raise `ModelError` for weights that are NaN or infinite, with the name of the first.

    Masks of attention may be infinite. Values of ``tensors`` that are no tensors are left out.
    """
    import torch

    for name, one in tensors.items():
        if not isinstance(one, torch.Tensor) or not one.is_floating_point() or not one.numel():
            continue
        # Without a copy of the weights; of fp8 there is no minimum.
        if one.itemsize < 2 or "mask" in name or all(map(torch.isfinite, torch.aminmax(one))):
            continue
        raise not_finite(path, name)


def not_finite(path: Path, name: str) -> ModelError:
    """Return the error for weights of this ``name`` that are not finite."""
    return ModelError(
        f"{path} has weights that are NaN or infinite, such as {short_repr(name)}",
        hint="take an earlier state of its training, or another model",
    )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; raises ModelError if unreadable."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def is_onnx(model: Path | str) -> bool:
    """Return whether a path has the suffix .onnx."""
    return Path(model).suffix.lower() == ".onnx"


def _require_content(path: Path, head: bytes) -> None:
    if not head:
        raise ModelError(f"{path} is empty", hint=DOWNLOAD_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model itself", hint="git lfs pull")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(
            f"{path} is a web page that was saved under a model's name", hint=DOWNLOAD_AGAIN
        )


def metadata_error(path: Path) -> str:
    """Return the start of an error message about damaged metadata."""
    return f"the metadata of {path} is damaged"


def parse_json(path: Path, entry: str, text: str) -> Any:
    """Parse the JSON of an entry.

    Raises `ModelError` for text that is no JSON, too long or nested too deep.
    """
    if len(text) > MOST_CHARACTERS:
        raise ModelError(f"{metadata_error(path)}: {entry} has {len(text)} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{metadata_error(path)}: {entry}: {error}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong, with the name of its field if there is one."""
    one = error.errors()[0]
    return ": ".join(
        filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")))
    )


def size_rule(where: str, values: Any) -> SizeRule:
    """Build a `SizeRule` from a table of its fields.

    Raises `ModelError`, which begins with ``where``, for one that makes no sense or needs sides
    above `LARGEST_SIDE`.
    """
    known = {"minimum": int, "multiple_of": int, "square": bool}
    if not isinstance(values, Mapping) or not set(values) <= set(known):
        raise ModelError(f"{where}: a size rule has only the fields {', '.join(known)}")
    wrong = [name for name, value in values.items() if type(value) is not known[name]]
    if wrong or max([0, *values.values()]) > LARGEST_SIDE:
        shown = ", ".join(f"{name} {str(value)[:20]}" for name, value in values.items())
        raise ModelError(
            f"{where}: a size rule needs values up to {LARGEST_SIDE} pixels, not {shown}"
        )
    try:
        return SizeRule(**values)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
