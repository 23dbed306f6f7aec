"""Captured graphs in the cache folder: capturing a deep network takes seconds and 100 MiB."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.memory.cache import MeasurementCache
from lowtide.memory.plan_store import cache_folder, package_digest
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.capture.graph_json import NotPlainError, graph_from_json, graph_to_json
from lowtide.streaming.capture.model_inputs import memory_format_of

_GRAPH = "graph"
# A graph takes some 70 KiB, and each size of picture has its own.
_MOST_GRAPHS = 256
# Packages whose code is part of the key anyway.
_KNOWN_PACKAGES = frozenset({"torch", "lowtide"})


class GraphStore:
    """Graphs of one network in the cache folder, by the shape of its input.

    Args:
        network: Identity of the network: what its weights and settings follow from.
        module: The network as it is built from that.
    """

    def __init__(self, network: str, module: nn.Module) -> None:
        self._module, self._code = module, _code_digest(module)
        kind = type(module).__qualname__, repr(module), module.training
        self._facts = network, kind, package_digest()

    def get(self, image: Tensor) -> Graph | None:
        """Return the graph for inputs like ``image`` (B, C, H, W), or None."""
        text = self._store(image).get(_GRAPH)
        if not isinstance(text, str):
            return None
        try:
            found = json.loads(zlib.decompress(base64.b64decode(text)))
            return graph_from_json(found, self._module)
        except (NotPlainError, ValueError, zlib.error):
            return None  # damaged: captured again and replaced

    def put(self, image: Tensor, graph: Graph) -> None:
        """Store a graph as captured; one that JSON cannot hold is captured each time."""
        if self._code is None:
            return
        try:
            text = json.dumps(graph_to_json(graph, self._module), separators=(",", ":"))
        except NotPlainError:
            return
        store = self._store(image)
        store.put(_GRAPH, base64.b64encode(zlib.compress(text.encode())).decode())
        store.save()
        _drop_oldest(cache_folder())

    def _store(self, image: Tensor) -> MeasurementCache:
        facts = (
            *self._facts,
            self._code,
            (image.shape, image.dtype, memory_format_of(image)),
            torch.get_default_dtype(),
            AutocastState.current(image.device.type),
        )
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        return MeasurementCache(f"{_GRAPH}-{digest}", cache_folder(), device=str(image.device))


def _drop_oldest(folder: Path) -> None:
    """Remove the graphs of a folder that were written first, where there are too many."""
    with contextlib.suppress(OSError):  # another process may drop the same
        files = sorted(folder.glob(f"{_GRAPH}-*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_GRAPHS]:
            path.unlink(missing_ok=True)


def _code_digest(module: nn.Module) -> str | None:
    """Return a hash of the source of a network's classes; None for one that has no files."""
    homes = {type(part).__module__ for part in module.modules()}
    digest = hashlib.sha256()
    for name in sorted(homes):
        package = name.partition(".")[0]
        if package in _KNOWN_PACKAGES:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return None
        try:
            digest.update(f"{package} {version(package)} {name}".encode())
            digest.update(Path(file).read_bytes())
        except (PackageNotFoundError, OSError):  # a script, whose helpers may be anywhere
            return None
    return digest.hexdigest()
