"""Captured graphs in the cache folder: capturing a deep network takes seconds and 100 MiB."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.memory.plan_store import PlanStore, machine
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.capture.graph_json import NotPlainError, graph_from_json, graph_to_json
from lowtide.streaming.capture.model_inputs import memory_format_of

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
        self._network = network, kind

    def get(self, image: Tensor) -> Graph | None:
        """Return the graph for inputs like ``image`` (B, C, H, W), or None."""
        stored = PlanStore().get("graph", *self._facts(image))
        if stored is None:
            return None
        try:
            return graph_from_json(stored, self._module)
        except NotPlainError:  # operators of a package that is not imported here
            return None

    def put(self, image: Tensor, graph: Graph) -> None:
        """Store a graph as captured; one that JSON cannot hold is captured each time."""
        if self._code is None:
            return
        with contextlib.suppress(NotPlainError):
            stored = graph_to_json(graph, self._module)
            PlanStore().put("graph", *self._facts(image), value=stored)

    def _facts(self, image: Tensor) -> tuple[object, ...]:
        return (
            *self._network,
            self._code,
            (image.shape, image.dtype, memory_format_of(image)),
            torch.get_default_dtype(),
            AutocastState.current(image.device.type),
            *machine(str(image.device)),
        )


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
