"""One bounded store of what was found out on this machine, so that it is found out once.

Each entry is a file of its own in the folder ``plans`` of the cache folder, written atomically and
with a checksum. What is damaged, of another package, or cannot be read counts as not stored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
import zlib
from pathlib import Path
from typing import Any, Literal

from lowtide._version import __version__
from lowtide.core.atomic_file import atomic_write
from lowtide.core.cpuinfo import cpu_name
from lowtide.core.errors import InputError, OutputError
from lowtide.core.input_file import is_file, require_input
from lowtide.core.torch_state import loaded_torch, thread_count

Kind = Literal[
    "costs", "operators", "bands", "graph", "proof", "clock", "resident", "runs", "libraries"
]
# Most files and bytes of the store. A deep network's graph takes 28 KiB, its bands 20, and most
# others one.
_MOST_FILES, _MOST_BYTES = 2048, 64 << 20
# Entries, and what a killed process left of one.
_OWN = re.compile(r"[a-z]+-[0-9a-f]{24}|\.[0-9a-f]{16}\.[a-z]+-[0-9a-f]{24}\.lowtide\.part")
# What release 0.2 left in the cache folder.
_OF_0_2 = re.compile(
    r"([0-9a-f]{24}|library-memory|(operators|clock-ratios)-[0-9a-f]{16}"
    r"|(certificate|apart)-[0-9a-f]{24}|(bands|graph|passed-over|beside|compiled)-[0-9a-f-]{33,})"
    r"\.json|residuals-[0-9a-f]{16}\.jsonl"
)


def cache_folder() -> Path | None:
    """Return the cache folder: ``LOWTIDE_CACHE``, or the platform's default.

    A variable that is empty counts as not set. None where there is no home to keep it in.
    """
    if given := os.environ.get("LOWTIDE_CACHE"):
        return Path(given)
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and Path(named).is_absolute():  # as XDG has it
        return Path(named) / "lowtide"
    try:
        home = Path.home()
    except RuntimeError:  # a user whom the system does not know, as in containers
        return None
    places = {"win32": Path(), "darwin": Path("Library", "Caches")}
    return home / places.get(sys.platform, Path(".cache")) / "lowtide"


class JsonCache:
    """Values that JSON can hold, by kind and the facts that they follow from.

    Facts count by their repr; this package's source is always one of them. ``folder`` is the cache
    folder by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        kept = folder or cache_folder()
        self._folder = kept and kept / "plans"

    def get(self, kind: Kind, *facts: object) -> Any:
        """Return the stored value, or None."""
        name, key = _name_and_key(kind, facts)
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            require_input(path)
            check, _, data = path.read_bytes().partition(b"\n")
        except (OSError, InputError):
            return None
        if check != _checksum(key, data):
            return None
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(path)  # what is used is dropped last
        return json.loads(zlib.decompress(data))

    def put(self, kind: Kind, *facts: object, value: Any) -> None:
        """Store a value; where the folder cannot be written, it is found out again next time."""
        name, key = _name_and_key(kind, facts)
        if self._folder is None:
            return
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode())
        with contextlib.suppress(OSError, OutputError):
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True, exist_ok=True)
                _drop_files_of_0_2(self._folder.parent)
            path = self._folder / name
            if not is_file(path):  # what others may have planted in this folder
                path.unlink(missing_ok=True)
            with atomic_write(path) as part:
                part.write_bytes(_checksum(key, data) + b"\n" + data)
            _drop_least_used(self._folder)


class JsonCacheTable:
    """Many small values in one entry of a `JsonCache`, in memory until `save`.

    The arguments are those of `JsonCache` and of its `get`.
    """

    def __init__(self, kind: Kind, *facts: object, folder: Path | None = None) -> None:
        self._store, self._facts = JsonCache(folder), facts
        self._kind: Kind = kind
        self._new: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Return the value under ``key``, or None."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Hold ``value`` under ``key`` until `save` stores it."""
        self._values[key] = self._new[key] = value

    def save(self) -> None:
        """Store new values together with those that other processes stored meanwhile."""
        if self._new:
            self._store.put(self._kind, *self._facts, value=self._stored() | self._new)
            self._new = {}

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        return self._stored()

    def _stored(self) -> dict[str, Any]:
        return self._store.get(self._kind, *self._facts) or {}


@functools.cache
def package_digest() -> str:
    """Return a hash of this package's version and source.

    It also changes with every edit during development.
    """
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine_facts(device: str = "cpu") -> tuple[str, ...]:
    """Return what the memory and time of a run on ``device`` follow from on this machine."""
    torch = loaded_torch()
    name = device  # a device that is not present is identified by its profile's name
    if device == "cpu":
        name = cpu_name() or platform.machine()
    elif torch is not None and device.startswith("cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    built = () if torch is None else (str(torch.__version__), torch.__config__.show())
    return device, name, *built, str(thread_count())


def _name_and_key(kind: Kind, facts: tuple[object, ...]) -> tuple[str, bytes]:
    key = repr((kind, package_digest(), facts)).encode()
    return f"{kind}-{hashlib.sha256(key).hexdigest()[:24]}", key


def _checksum(key: bytes, data: bytes) -> bytes:
    return hashlib.sha256(key + data).hexdigest().encode()


def _drop_least_used(folder: Path) -> None:
    """Remove entries that were not used for longest, where there is too much."""
    names = (entry for entry in os.scandir(folder) if _OWN.fullmatch(entry.name))
    files = [(entry.stat(follow_symlinks=False), entry.path) for entry in names]
    count, total = len(files), sum(facts.st_size for facts, _ in files)
    for facts, path in sorted(files, key=lambda one: one[0].st_mtime_ns):
        if count <= _MOST_FILES and total <= _MOST_BYTES:
            break
        Path(path).unlink(missing_ok=True)
        count, total = count - 1, total - facts.st_size


def _drop_files_of_0_2(folder: Path) -> None:
    for path in folder.iterdir():
        if _OF_0_2.fullmatch(path.name):
            path.unlink(missing_ok=True)
