"""CPU model and features, from ``/proc/cpuinfo``."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


@cache
def cpu_name() -> str:
    """Return the CPU's name with family and model numbers; empty if unknown.

    Virtual machines give one name to several generations, which the numbers distinguish.
    """
    name, *_ = *cpuinfo_field("model name"), platform.processor()
    numbers = cpuinfo_field("cpu family")[:1] + cpuinfo_field("model\t")[:1]
    return f"{name} (family {', model '.join(numbers)})" if len(numbers) == 2 else name


def cpuinfo_field(key: str) -> list[str]:
    """Return the values of ``key`` in ``/proc/cpuinfo``, one per processor.

    Empty on systems other than Linux.
    """
    return [line.split(":", 1)[1].strip() for line in _lines() if line.startswith(key)]


@cache
def _lines() -> list[str]:
    """Return the lines of ``/proc/cpuinfo``, cached.

    With hundreds of processors, reading takes milliseconds.
    """
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []
