"""On-disk cache of measured costs, so that a model is probed once per machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from lowtide.core.atomic_file import atomic_write
from lowtide.core.cpuinfo import cpu_name


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
