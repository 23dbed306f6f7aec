"""Safe readers of torch.save files, without unpickling and without torch.load.

What is read from a file is bounded by its size, whatever it claims. Nothing in it is called,
extracted or written anywhere.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.core.errors import ModelError
from lowtide.models.checkpoints.containers import (
    PICKLE,
    ZIP,
    LegacyCheckpoint,
    UnacceptedFileError,
    ZipCheckpoint,
)
from lowtide.models.checkpoints.pickle_objects import (
    DamagedCheckpointError,
    ForbiddenNameError,
    TensorRef,
)
from lowtide.models.model_files import DOWNLOAD_AGAIN, require_finite

__all__ = ["read_state_dict"]


# Keys that wrap a state_dict, as in spandrel; EMA weights before the others.
_WRAPPERS = """
    model_state_dict state_dict params_ema params-ema params model net net_g netG generator
""".split()
_DEEPEST = 8
# Tensors may share or repeat storages, up to _TIMES the size of the file plus _ANYHOW bytes.
_BYTES_FACTOR, _BASE_BYTES = 4, 1 << 20
# Everything that damaged archives were seen to raise in zipfile.
_DAMAGE = (
    DamagedCheckpointError,
    zipfile.BadZipFile,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    NotImplementedError,
    OverflowError,
    struct.error,
)


def read_state_dict(path: Path) -> dict[str, Any]:
    """Read the named tensors of a torch.save file on the CPU, and plain values.

    Raises `ModelError` for damage, for a file of another kind, for one that asks for objects that
    no model's weights need, for one without named tensors, and for values that are not finite.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(len(ZIP))
            file.seek(0)
            if not head.startswith((ZIP, PICKLE)):
                raise DamagedCheckpointError("it does not start like a file of torch.save")
            found = (ZipCheckpoint if head == ZIP else LegacyCheckpoint)(file, size)
            table = _find_state_dict(path, found.content)
            _require_bounded(table.values(), size)
            tensors = _tensors(table, found)
    except ForbiddenNameError as error:
        raise ModelError(
            f"{path} has an object of {error.name[:100]}, which no model's weights need and"
            " which could run code when it is loaded: it was refused",
            hint="get this model as .safetensors, which cannot contain code",
        ) from error
    except UnacceptedFileError as error:
        raise ModelError(f"{path} {error}, and was refused", hint=error.hint) from error
    except _DAMAGE as error:
        raise ModelError(
            f"{path} is damaged, or not written by PyTorch: {error}", hint=DOWNLOAD_AGAIN
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    require_finite(path, tensors)
    return tensors


def _find_state_dict(path: Path, content: Any) -> dict[str, Any]:
    """Return the innermost dictionary within the wrappers of training programs."""
    for _ in range(_DEEPEST):
        if not isinstance(content, dict):
            break
        inner = next(
            (content[key] for key in _WRAPPERS if isinstance(content.get(key), dict)), None
        )
        if inner is None and len(content) == 1:
            inner = next(iter(content.values()))
        if not isinstance(inner, dict):
            break
        content = inner
    named = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    if not named or not any(isinstance(value, TensorRef) for value in content.values()):
        raise ModelError(f"{path} has no model: no dictionary of named tensors was found in it")
    return content


def _require_bounded(values: Iterable[Any], size: int) -> None:
    places = [value for value in values if isinstance(value, TensorRef)]
    total = sum(math.prod(one.size) * one.storage.dtype.itemsize for one in places)
    if total > _BYTES_FACTOR * size + _BASE_BYTES:
        raise DamagedCheckpointError(
            f"its tensors have {total} bytes, but the file has only {size}"
        )


def _tensors(table: dict[str, Any], file: ZipCheckpoint | LegacyCheckpoint) -> dict[str, Any]:
    stored: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    for name, place in table.items():
        if not isinstance(place, TensorRef):
            if isinstance(place, (int, float, str)):
                found[name] = place
            continue
        storage = place.storage
        if 0 in place.size:
            found[name] = torch.empty(place.size, dtype=storage.dtype)
            continue
        if storage.key not in stored:
            stored[storage.key] = file.read_storage(storage)
        values = stored[storage.key].view(storage.dtype)
        found[name] = values.as_strided(place.size, place.stride, place.offset)
    return found
