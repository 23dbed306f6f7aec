"""Memory budget of a run: bytes on the compute device, in host memory and on disk."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.core.errors import UsageError
from lowtide.core.input_file import exists
from lowtide.core.units import MIB, format_bytes, parse_bytes
from lowtide.memory.library_memory import (
    budget_room,
    bytes_beside_budget,
    enough,
    require_room_for_processes,
    room_for_processes,
)
from lowtide.memory.process_memory import (
    MemoryLimit,
    available_host_bytes,
    memory_limits,
    physical_host_bytes,
)

if TYPE_CHECKING:
    from lowtide.memory.profiles import DeviceProfile

# `auto` leaves the rest to the machine: a desktop, a browser, the page cache.
_AUTO_HOST_SHARE, _AUTO_DEVICE_SHARE = 0.6, 0.9


@dataclass(frozen=True)
class Budget:
    """Bytes allowed on the compute device, in host memory and on disk.

    On the CPU the device is the host: ``device_bytes`` is what the run may add to the process's
    resident memory once the libraries are loaded, and ``host_bytes`` has the same value. On CUDA
    ``device_bytes`` counts the whole process, its CUDA context included. ``note`` says what makes
    it smaller than was asked for.

    A limit on the process, ``limit_name``, leaves ``room_bytes`` of host memory at most; beside a
    budget it has to hold ``beside_bytes``.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    device: str = "cpu"
    note: str = ""
    limit_name: str = ""
    room_bytes: int = sys.maxsize
    beside_bytes: int = 0

    @classmethod
    def parse(
        cls,
        text: str | int | Budget = "auto",
        *,
        device: str = "cpu",
        host: str | int | None = None,
        disk: str | int | None = None,
        scratch: Path | None = None,
    ) -> Budget:
        """Parse a budget: ``"6GiB"``, ``"80%"`` (of free memory), ``"auto"`` or bytes.

        ``host`` and ``disk`` take the same forms; None means ``"auto"``. ``"auto"`` is 90% of the
        free memory of a CUDA device and of the free disk space at ``scratch``, and 60% of the
        available host memory. What a container or ``ulimit`` leaves is the most for host memory.

        Raises:
            UsageError: for text that is not a size, less than 1 MiB, or more than the machine has.
        """
        if isinstance(text, Budget):
            return text
        on_cpu = device == "cpu"
        memory = _FreeBytes(available_host_bytes(), physical_host_bytes(), _AUTO_HOST_SHARE)
        disk_usage = shutil.disk_usage(_existing(scratch or Path()))
        disk_room = _FreeBytes(disk_usage.free, disk_usage.total, _AUTO_DEVICE_SHARE)
        device_bytes = _resolve(text, memory if on_cpu else _free_device_memory(device), "budget")
        host_bytes = _resolve(host, memory, "host budget")
        if on_cpu:
            # Host and device memory are the same here: an explicit host budget can only lower the
            # limit.
            device_bytes = host_bytes = min(device_bytes, host_bytes) if host else device_bytes
        disk_bytes = _resolve(disk, disk_room, "disk budget")
        asked = cls(device_bytes, host_bytes, disk_bytes, device)
        return asked.within(memory_limits())

    def within(self, limits: Sequence[MemoryLimit]) -> Budget:
        """Return the budget, or the smaller one that limits on this process's memory leave.

        To pass them is to be killed, which other programs' memory need not come to. Stacks and the
        libraries that planning imports have their room beside the budget.
        """
        tightest = min(limits, key=budget_room, default=None)
        if tightest is None:
            return self
        limited = replace(
            self,
            limit_name=tightest.name,
            room_bytes=budget_room(tightest),
            beside_bytes=bytes_beside_budget(tightest),
        )
        if limited.room_bytes >= self.host_bytes:
            return limited
        left = max(MIB, limited.room_bytes)
        device_bytes = left if self.device == "cpu" else self.device_bytes
        note = f"the budget is {format_bytes(left)}, which is left of {tightest}"
        return replace(limited, device_bytes=device_bytes, host_bytes=left, note=note)

    def of_processes(self, count: int) -> Budget:
        """Return the budget of each of ``count`` processes that this one starts: what is left.

        Their libraries are theirs, so a container has to hold them ``count`` times.

        Raises:
            BudgetError: It does not.
        """
        require_room_for_processes(count)
        left = room_for_processes(count)
        if left >= self.host_bytes:
            return self
        device_bytes = left if self.device == "cpu" else self.device_bytes
        note = f"the budget is {format_bytes(left)}, which the container leaves each process"
        return replace(self, device_bytes=device_bytes, host_bytes=left, note=note)

    def hint_for(self, needed_bytes: int) -> str:
        """Return what makes a plan fit that needs so many bytes: an option, and a higher limit."""
        option = f"--budget {-(-needed_bytes // MIB)}MiB"
        if self.device != "cpu" or needed_bytes <= self.room_bytes:
            return option
        return (
            f"raise {self.limit_name} to {enough(self.beside_bytes + needed_bytes)}, and {option}"
        )

    @classmethod
    def for_profile(cls, profile: DeviceProfile, text: str | int | Budget = "auto") -> Budget:
        """Return a budget for the device of ``profile``, which need not be present.

        ``"auto"`` and percentages are of the memory that the desktop leaves. Host memory (except
        for a CPU profile, where it is the device's) and disk are unlimited.

        Raises:
            UsageError: as `parse`.
        """
        if isinstance(text, Budget):
            return text
        free = profile.total_bytes - profile.desktop_bytes
        memory = _FreeBytes(free, profile.total_bytes, _AUTO_DEVICE_SHARE, profile.title)
        count = _resolve(text, memory, "budget")
        host = count if profile.kind == "cpu" else sys.maxsize
        return cls(count, host, sys.maxsize, profile.name)

    def __str__(self) -> str:
        return format_bytes(self.device_bytes)


@dataclass(frozen=True)
class _FreeBytes:
    """Free and total bytes of one kind of memory, and the share of free for `auto`."""

    free: int
    total: int
    auto_share: float
    owner: str = "this machine"


def require_valid_budget(text: str | int | Budget) -> None:
    """Raise `UsageError` for what is no budget of any device."""
    if not isinstance(text, Budget):
        _resolve(text, _FreeBytes(sys.maxsize, sys.maxsize, 1.0), "budget")


def _resolve(text: str | int | None, available: _FreeBytes, what: str) -> int:
    normalized = "auto" if text is None else str(text).strip().lower()
    if normalized == "auto":
        return int(available.free * available.auto_share)
    if normalized.endswith("%"):
        try:
            share = float(normalized[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise UsageError(f"{what} {text!r} is not a percentage from 1% to 100%")
        return int(available.free * share)
    count = parse_bytes(normalized, what=what)
    if count < MIB:
        raise UsageError(
            f"{what} {text!r} is {format_bytes(count)}, but a run needs at least"
            f" {format_bytes(MIB)}",
            hint="did you mean a larger unit, such as 2GiB or 600MiB?",
        )
    if count > available.total:
        raise UsageError(
            f"{what} {text!r} is more than {available.owner} has: {format_bytes(available.total)},"
            f" {format_bytes(available.free)} of it free now",
            hint="use auto, or a share of what is free, such as 80%",
        )
    return count


def _free_device_memory(device: str) -> _FreeBytes:
    import torch

    return _FreeBytes(*torch.cuda.mem_get_info(torch.device(device)), _AUTO_DEVICE_SHARE)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not exists(path):
        path = path.parent
    return path
