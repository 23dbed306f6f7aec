"""What Linux tells of this machine's processors."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def cpu_name() -> str:
    """The name and, since virtual machines give one name to several generations, the numbers that
    tell those apart; empty where it is not known."""
    name, *_ = *cpuinfo_field("model name"), platform.processor()
    numbers = cpuinfo_field("cpu family")[:1] + cpuinfo_field("model\t")[:1]
    return f"{name} (family {', model '.join(numbers)})" if len(numbers) == 2 else name


def is_amd() -> bool:
    """Whether AMD made it; Windows names the maker too."""
    return "AuthenticAMD" in (*cpuinfo_field("vendor_id")[:1], platform.processor().split(", ")[-1])


def cpuinfo_field(key: str) -> list[str]:
    """What is said of each processor under ``key``; nothing on other systems."""
    return [line.split(":", 1)[1].strip() for line in _lines() if line.startswith(key)]


@cache
def _lines() -> list[str]:
    """Read once: where there are hundreds of processors, they take milliseconds to tell."""
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []
