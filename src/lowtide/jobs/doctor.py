"""Facts of this machine: versions, devices, precisions, extras, attention."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from lowtide.attention.availability import backend_availability
from lowtide.core.errors import install_extra
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.engine.report import versions_used
from lowtide.memory.cpu_half_precision import low_precision_slowdown
from lowtide.memory.plan_store import cache_folder
from lowtide.memory.process_memory import available_host_bytes


def examine_machine() -> dict[str, Any]:
    """Return the facts of this machine as plain data, for people and for bug reports.

    Takes a few MiB of host memory and no GPU memory.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {**versions_used(), "spandrel": importlib.metadata.version("spandrel")},
        "devices": [_cpu(), *_gpus()],
        "half_precision_on_cpu": low_precision_slowdown(),
        "disk_free_bytes": shutil.disk_usage(Path()).free,
        "cache_folder": None if (cached := cache_folder()) is None else str(cached),
        "extras": _extras(),
        "attention": [vars(backend) for backend in backend_availability()],
    }


def _cpu() -> dict[str, Any]:
    import torch

    return {
        "name": "cpu",
        "description": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "free_bytes": available_host_bytes(),
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "description": f"{facts.name}, compute capability {facts.major}.{facts.minor}",
                "free_bytes": torch.cuda.mem_get_info(index)[0],
                "total_bytes": facts.total_memory,
            }
        )
    return found


def _extras() -> list[dict[str, Any]]:
    """Return each extra of this installation: complete, or the packages that it lacks."""
    metadata = importlib.metadata.metadata("lowtide")
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    rows = []
    for extra in metadata.get_all("Provides-Extra") or []:
        needed = [
            requirement.name
            for requirement in requirements
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and not requirement.marker.evaluate({"extra": ""})
        ]
        missing = [name for name in needed if not _installed(name)]
        rows.append(
            {
                "name": extra,
                "complete": not missing,
                "missing": missing,
                "fix": install_extra(extra) if missing else "",
            }
        )
    return rows


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
