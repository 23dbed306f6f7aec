"""On-disk cache of measured costs, so that a model is probed once per machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from lowtide._version import __version__
from lowtide.core.atomic_file import atomic_write
from lowtide.core.cpuinfo import cpu_name
from lowtide.core.heap import heap_is_tuned
from lowtide.memory.costs import ModelCosts, TracedPoint
from lowtide.memory.plan_store import cache_folder


class MeasurementCache:
    """Key-value cache of measured facts in one JSON file per device and versions.

    The file's name depends on ``kind``, the device and its hardware, the PyTorch version and build,
    and the number of threads. Values are what JSON can hold. With ``folder`` None nothing is
    written to disk.
    """

    def __init__(self, kind: str, folder: Path | None = None, *, device: str = "cpu") -> None:
        import torch

        parts = (
            device,
            _hardware(device),
            str(torch.__version__),
            torch.__config__.show(),
            str(torch.get_num_threads()),
        )
        name = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
        self._path = None if folder is None else folder / f"{kind}-{name}.json"
        self._entries: dict[str, Any] | None = None
        self._changed = False

    def get(self, key: str) -> Any:
        """Return the value stored under ``key``, or None."""
        if self._entries is None:
            self._entries = self._read()
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store ``value`` under ``key`` in memory; `save` writes it to disk."""
        if self._entries is None:
            self._entries = self._read()
        self._entries[key] = value
        self._changed = True

    def save(self) -> None:
        """Write new values to disk, merged with those of other processes."""
        if self._path is None or not self._changed:
            return
        write_cached(self._path, json.dumps({**self._read(), **(self._entries or {})}))
        self._changed = False

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.is_file():
            return {}
        try:
            found = json.loads(self._path.read_text())
        except (ValueError, RecursionError, OSError):
            return {}  # damaged: measured again and replaced
        return found if isinstance(found, dict) else {}


class CostCache:
    """Cache of `ModelCosts`: one JSON file per model, device, precision and versions.

    ``folder`` is `cache_folder` by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder()

    def key(self, sha256: str, device: str, precision: str, part: int | str | None = None) -> str:
        """Return the cache key of a model; changes with whatever affects memory or speed.

        Costs of which only a ``part`` is known have a key of their own: those whose measurement a
        limit cut short, by its bytes, and those of whole images, by that word.
        """
        import torch

        parts = (
            sha256,
            device,
            precision,
            _hardware(device),
            str(torch.__version__),
            __version__,
            str(torch.get_num_threads()),
            str(heap_is_tuned()),
            str(part),
            # Entries written before a field existed lack it.
            *ModelCosts.model_fields,
            *TracedPoint.model_fields,
        )
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]

    def get(self, key: str) -> ModelCosts | None:
        """Return the costs stored under ``key``, or None."""
        path = self._folder / f"{key}.json"
        if not path.is_file():
            return None
        try:
            return ModelCosts.model_validate_json(path.read_text())
        except (ValueError, OSError):
            return None  # damaged or of another version: measured again and replaced

    def put(self, key: str, costs: ModelCosts) -> None:
        """Store ``costs`` under ``key``; a folder that cannot be written is ignored.

        The costs are then measured again next time.
        """
        write_cached(self._folder / f"{key}.json", costs.model_dump_json(indent=1))


def _hardware(device: str) -> str:
    if device == "cpu":
        return cpu_name() or platform.machine()
    if not device.startswith("cuda"):
        return device  # a device that is not present is identified by its profile's name
    import torch

    return torch.cuda.get_device_name(device)


def write_cached(path: Path, text: str) -> None:
    """Replace a cache file atomically; errors are ignored and it is measured again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(text)
