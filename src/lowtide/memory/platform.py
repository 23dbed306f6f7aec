"""Memory-related facts of the operating system, overridable for tests."""

from __future__ import annotations

import contextlib
import platform as system
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from typing import Literal

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.units import MIB, format_bytes, format_seconds

Name = Literal["linux", "windows", "darwin", "wsl"]

# Kept free where the desktop shares the GPU and the driver spills instead of failing. A prior: what
# ComfyUI reserves on Windows (comfy/model_management.py).
_DESKTOP_BYTES = 600 * MIB
# A driver that moves memory over the bus slows runs by far more than this factor; clocks and other
# programs by less.
_SPILL_SLOWDOWN = 4.0
_BATCHES = 3


@dataclass(frozen=True)
class Platform:
    """Facts of an operating system that memory decisions depend on.

    ``expandable_segments``: PyTorch's CUDA allocator can grow its segments. Linux alone; under WSL
    the first allocation fails (pytorch/pytorch#192330).

    ``spills_to_shared_memory``: the driver moves what does not fit on the GPU to host memory
    instead of failing, and everything slows down.

    ``pinned_share``: share of the host's memory that may be pinned. A prior.

    ``rename_over_open_files``: a file can be replaced or deleted while it is open for reading.

    ``process_data_limit``: RLIMIT_DATA makes an allocation fail where it should.

    ``high_water_mark``: procfs keeps, and can reset, the peak of resident memory.
    """

    name: Name
    expandable_segments: bool
    spills_to_shared_memory: bool
    pinned_share: float
    rename_over_open_files: bool
    process_data_limit: bool
    high_water_mark: bool


_PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("linux", True, False, 0.5, True, True, True),
        # Windows's memory and driver below a Linux kernel.
        Platform("wsl", False, True, 0.4, True, True, True),
        Platform("windows", False, True, 0.4, False, False, False),
        Platform("darwin", False, False, 0.5, True, False, False),
    )
}
_override: ContextVar[Platform | None] = ContextVar("lowtide_platform", default=None)


def current_platform() -> Platform:
    """Return the platform of this process, or the one that `override_platform` set.

    A system that is none of the four is treated as macOS, which guarantees least.
    """
    return _override.get() or _PLATFORMS[_detect()]


def _detect() -> Name:
    if sys.platform == "win32":
        return "windows"
    if sys.platform.startswith("linux"):
        return "wsl" if "microsoft" in system.release().lower() else "linux"
    return "darwin"


@contextlib.contextmanager
def override_platform(name: str) -> Iterator[Platform]:
    """Override `current_platform` inside the block.

    For tests, and for planning on behalf of another machine. ``name`` is "linux", "windows",
    "darwin" or "wsl". A context variable: threads that are already running do not see it.

    Raises:
        UsageError: for any other name.
    """
    platform = _PLATFORMS.get(name)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if platform is None:
        raise UsageError(f"platform {name!r} is not known", hint=f"one of {', '.join(_PLATFORMS)}")
    token = _override.set(platform)
    try:
        yield platform
    finally:
        _override.reset(token)


def allocator_memory_fraction(
    platform: Platform, budget_bytes: int, total_bytes: int, context_bytes: int
) -> float | None:
    """Return the fraction for `torch.cuda.set_per_process_memory_fraction`, or None.

    ``total_bytes`` is the device's memory, ``context_bytes`` what this process holds outside the
    allocator: the budget counts it, the cap does not. Where drivers spill there is always a cap,
    below the whole GPU, so that PyTorch raises before the driver begins to move memory. Elsewhere
    None means that the GPU's own memory is the smaller limit.

    Raises:
        BudgetError: if the context takes all of the budget.
    """
    limit = budget_bytes
    if platform.spills_to_shared_memory:
        limit = min(limit, total_bytes - _DESKTOP_BYTES)
    elif budget_bytes >= total_bytes:
        return None
    if limit <= context_bytes:
        raise BudgetError(
            f"the CUDA context takes {format_bytes(context_bytes)}, so that nothing is left of the"
            f" {format_bytes(limit)} allowed on the device",
            hint="raise the budget, or run on the CPU",
        )
    return (limit - context_bytes) / total_bytes


def spill_warning(seconds: Sequence[float], *, platform: Platform) -> str | None:
    """Return a warning if the driver seems to spill to host memory, or None.

    ``seconds`` are those of equal-sized batches of one run, in the order they ran. A spill is
    assumed where the median of the last three is above four times the median of the first three;
    one slow batch, or a slow start, is not enough. Always None where drivers fail instead of
    spilling.
    """
    if not platform.spills_to_shared_memory or len(seconds) < 2 * _BATCHES:
        return None
    first, last = median(seconds[:_BATCHES]), median(seconds[-_BATCHES:])
    if last <= _SPILL_SLOWDOWN * first:
        return None
    return (
        f"the last batches took {format_seconds(last)} each, the first ones"
        f" {format_seconds(first)}: the driver has probably moved GPU memory to the host;"
        " a smaller budget avoids that"
    )
