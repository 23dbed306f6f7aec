"""Lowtide's model files: safetensors whose metadata holds the configuration.

``lowtide.architecture`` names the architecture and ``lowtide.config`` holds its sizes as JSON, so
that nothing has to be guessed from the names of tensors. `describe_file` reads the header alone and
imports no PyTorch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.atomic_file import atomic_output, make_folder
from lowtide.core.errors import ModelError
from lowtide.models.descriptor import ModelDescriptor
from lowtide.models.families import (
    Architecture,
    FileConfig,
    architecture_named,
    architecture_of,
    command_for,
)
from lowtide.models.model_files import (
    DOWNLOAD_AGAIN,
    metadata_error,
    not_finite,
    parse_json,
    require_finite,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.models.ncnn_graph import NcnnGraph

ARCHITECTURE = "lowtide.architecture"
CONFIG = "lowtide.config"
_METADATA_KEY = "__metadata__"
# Bytes of a header that safetensors reads at most.
_LARGEST_HEADER = 100_000_000
# Upper limit of widths and depths; below it, the file's tensors bound the network.
_LARGEST = 1 << 20


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; raises ModelError for a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        if (header := _header_of_other_values(path)) is None:
            raise ModelError(
                f"{path} is not a safetensors file, or is damaged: {error}", hint=DOWNLOAD_AGAIN
            ) from error
        entries = header[_METADATA_KEY]
        items = entries.items() if isinstance(entries, dict) else ()
        return {name: one if isinstance(one, str) else json.dumps(one) for name, one in items}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, of any shape, on the CPU.

    Raises ModelError for dtypes PyTorch does not have, and for values that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    try:
        header = _header_of_other_values(path)
        tensors = load_file(path) if header is None else load(_without_metadata(path, header))
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has tensors that PyTorch does not support: {error}") from error
    require_finite(path, tensors)
    return tensors


def _header_of_other_values(path: Path) -> dict[str, Any] | None:
    """Return the header of a safetensors file whose metadata are not all text, else None.

    The format allows text alone, and the library reads no other file; some programs write numbers.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size)) if size <= _LARGEST_HEADER else None
        except (ValueError, RecursionError):
            return None
    if not isinstance(header, dict) or _METADATA_KEY not in header:
        return None
    entries = header[_METADATA_KEY]
    text = isinstance(entries, dict) and all(isinstance(one, str) for one in entries.values())
    return None if text else header


def _without_metadata(path: Path, header: dict[str, Any]) -> bytes:
    """Return the bytes of a safetensors file with this header, less its metadata."""
    tensors = {name: one for name, one in header.items() if name != _METADATA_KEY}
    text = json.dumps(tensors).encode()
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return len(text).to_bytes(8, "little") + text + file.read()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors, of any shape and device, as a safetensors file; raises `OutputError`.

    The same tensors and metadata give the same bytes.
    """
    from safetensors.torch import save_file

    make_folder(path.parent)
    with atomic_output(path) as part:
        save_file(
            {name: one.detach().cpu().contiguous() for name, one in tensors.items()}, part, metadata
        )
        _sort_metadata(part)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file in place, which come in another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header = {_METADATA_KEY: dict(sorted(header.pop(_METADATA_KEY).items())), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) == size:
            file.seek(8)
            file.write(text)


def first_misfit(model: nn.Module, state: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that does not fit a model and what is wrong with it, else None."""
    wanted = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    given = {name: tuple(one.shape) for name, one in state.items()}
    if not (wrong := sorted(name for name, _ in wanted.items() ^ given.items())):
        return None
    name = wrong[0]
    return f"{name} is {given.get(name, 'missing')}, not {wanted.get(name, 'a part of the model')}"


def describe_file(path: Path, entries: dict[str, str], name: str, digest: str) -> ModelDescriptor:
    """Return the descriptor of a file with `ARCHITECTURE` in its metadata ``entries``.

    Raises ModelError for an architecture this version does not know, or a wrong configuration.
    """
    (config, architecture), parameters = _parse(path, entries), _count(path)
    return ModelDescriptor(
        name=name,
        architecture=entries[ARCHITECTURE],
        purpose="SR" if config.scale > 1 else "Restoration",
        scale=config.scale,
        in_channels=config.channels,
        out_channels=config.channels,
        size=config.size,
        supports_half=True,
        supports_bfloat16=True,
        tiling=architecture.tiling,
        tags=config.tags,
        noise=config.noise,
        parameters=parameters,
        weight_bytes=4 * (parameters + config.buffer_elements),
        sha256=digest,
        path=str(path),
    )


def metadata_for(config: Any) -> dict[str, str]:
    """Return the metadata for a file with weights of this configuration.

    There are none for one that no family writes: such a file is known by the names of its tensors.
    """
    found = architecture_of(config)
    return {} if found is None else {ARCHITECTURE: found[0], CONFIG: json.dumps(config.to_dict())}


def load_network(path: Path, entries: dict[str, str]) -> nn.Module:
    """Build the network and load its weights, in fp32 on the CPU.

    Raises ModelError where the tensors are not those that the configuration asks for.
    """
    from lowtide.models.build_limits import BuildLimitsMode

    (config, architecture), state = _parse(path, entries), read_tensors(path)
    try:
        with BuildLimitsMode(state.values()):
            module = architecture.build(config)
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"the tensors in {path} do not fit its metadata: {error}") from error
    return module


def read_graph(path: Path) -> tuple[NcnnGraph, int]:
    """Return a file's network for ncnn, and how many pixels to each side a result depends on.

    Raises ModelError where its architecture has no graph, and where the tensors are not those that
    the configuration asks for.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    entries = read_metadata(path)
    config, architecture = _parse(path, entries)
    if architecture.graph is None or config.reach is None:
        raise ModelError(f"{entries[ARCHITECTURE]} is run by PyTorch alone", hint="--runtime torch")
    try:
        tensors = _TakenTensors(load_file(path))
        graph = architecture.graph(config, tensors)
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"the tensors in {path} do not fit its metadata: {error}") from error
    if left := sorted(set(tensors) - tensors.taken):
        raise ModelError(f"the tensors in {path} do not fit its metadata: {left[0]} has no place")
    for name, one in tensors.items():
        if not np.isfinite(one).all():
            raise not_finite(path, name)
    return graph, config.reach


class _TakenTensors(dict[str, "np.ndarray"]):
    """Tensors by name, and the names of those that were ``taken``."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        super().__init__(tensors)
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.taken.add(name)
        return super().__getitem__(name)


def _count(path: Path) -> int:
    """Count the values in a file by its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(one).get_shape()) for one in file.keys())  # noqa: SIM118
    except SafetensorError:  # metadata that are not all text
        return sum(one.numel() for one in read_tensors(path).values())


def _parse(path: Path, entries: dict[str, str]) -> tuple[FileConfig, Architecture]:
    name = entries[ARCHITECTURE]
    if (architecture := architecture_named(name)) is None:
        if command := command_for(name):
            raise ModelError(f"{path} is of {name}, which maps no image to another", hint=command)
        raise ModelError(
            f"{path} needs the architecture {name!r}, which this version of Lowtide does not know",
            hint="install a newer version of Lowtide, or the package of its family",
        )
    values: Any = parse_json(path, CONFIG, entries.get(CONFIG, "null"))
    if not isinstance(values, dict):
        raise ModelError(f"{path} has no configuration in its metadata ({CONFIG})")
    large = [name for name, value in values.items() if isinstance(value, int) and value > _LARGEST]
    if large:
        raise ModelError(f"{metadata_error(path)}: {CONFIG}: {large[0][:40]} is above {_LARGEST}")
    return architecture.config.from_dict(values), architecture
