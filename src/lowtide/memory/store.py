"""Measured costs, kept between runs so that a model is probed once on a machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

from lowtide._version import __version__
from lowtide.core.heap import heap_is_tuned
from lowtide.memory.costs import ModelCosts


def cache_folder() -> Path:
    """Where measurements are kept: ``LOWTIDE_CACHE``, or the platform's cache folder."""
    if given := os.environ.get("LOWTIDE_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "lowtide"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lowtide"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lowtide"


class CostStore:
    """One small JSON file for each model, device, precision and set of versions."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder()

    def key(
        self, sha256: str, device: str, precision: str, limit_bytes: int | None = None
    ) -> str:
        """Name of an entry; changes with anything that may change memory or speed.

        Costs whose measuring was cut short by ``limit_bytes`` have a name of their own.
        """
        import torch

        hardware = platform.processor() or platform.machine()
        if device != "cpu":
            hardware = torch.cuda.get_device_name(device)
        parts = (
            sha256, device, precision, hardware, str(torch.__version__), __version__,
            str(torch.get_num_threads()), str(heap_is_tuned()),
            str(limit_bytes),
        )  # fmt: skip
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]

    def get(self, key: str) -> ModelCosts | None:
        """The costs stored under ``key``, or None."""
        path = self._folder / f"{key}.json"
        if not path.is_file():
            return None
        try:
            return ModelCosts.model_validate_json(path.read_text())
        except (ValueError, OSError):
            return None  # damaged or of another version: it is measured again and replaced

    def put(self, key: str, costs: ModelCosts) -> None:
        """Keep ``costs``; a folder that cannot be written only means measuring again."""
        path = self._folder / f"{key}.json"
        draft = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(costs.model_dump_json(indent=1))
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
