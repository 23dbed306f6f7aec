"""The bytes a run may use."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import UsageError
from lowtide.core.units import MIB, format_bytes, parse_bytes
from lowtide.memory.meter import available_host_bytes

# Left to the rest of the machine by `auto`: a desktop, a browser, the page cache.
_AUTO_HOST_SHARE, _AUTO_DEVICE_SHARE = 0.6, 0.9


@dataclass(frozen=True)
class Budget:
    """Bytes allowed on the compute device, in host memory and on disk.

    On the CPU the device is the host: ``device_bytes`` is what the run may add to the process's
    resident memory once the libraries are loaded, and ``host_bytes`` is the same number. On
    CUDA ``device_bytes`` counts the whole process, its context included.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    device: str = "cpu"

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
        """A budget from ``"6GiB"``, ``"80%"`` (of what is free now), ``"auto"`` or bytes.

        ``host`` and ``disk`` take the same forms; left out, they are what is free. Raises
        `UsageError` for text that is no size, or for more than the machine has.
        """
        if isinstance(text, Budget):
            return text
        free_host = available_host_bytes()
        free_disk = shutil.disk_usage(_existing(scratch or Path())).free
        on_cpu = device == "cpu"
        free_device = free_host if on_cpu else _free_device_bytes(device)
        share = _AUTO_HOST_SHARE if on_cpu else _AUTO_DEVICE_SHARE
        device_bytes = _resolve(text, free_device, share, "budget")
        host_bytes = _resolve(host or "auto", free_host, _AUTO_HOST_SHARE, "host budget")
        if on_cpu:
            # One memory, two names: the explicit or the smaller one rules.
            device_bytes = host_bytes = min(device_bytes, host_bytes) if host else device_bytes
        disk_bytes = _resolve(disk or "auto", free_disk, _AUTO_DEVICE_SHARE, "disk budget")
        return cls(device_bytes, host_bytes, disk_bytes, device)

    def __str__(self) -> str:
        return format_bytes(self.device_bytes)


def _resolve(text: str | int, free: int, auto_share: float, what: str) -> int:
    words = str(text).strip().lower()
    if words == "auto":
        return int(free * auto_share)
    if words.endswith("%"):
        try:
            share = float(words[:-1]) / 100
        except ValueError:
            share = -1
        if not 0 < share <= 1:
            raise UsageError(f"{what} {text!r} is not a percentage from 1% to 100%")
        return int(free * share)
    count = parse_bytes(text, what=what)
    if count < MIB:
        raise UsageError(
            f"{what} {text!r} is {format_bytes(count)}, less than any run can work in",
            hint="did you mean a larger unit, such as 2GiB or 600MiB?",
        )
    return count


def _free_device_bytes(device: str) -> int:
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
