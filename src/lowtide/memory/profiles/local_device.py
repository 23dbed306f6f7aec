"""Device profiles of the CPU and the GPUs of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from lowtide.core.errors import UsageError
from lowtide.memory.process_memory import total_host_bytes
from lowtide.memory.profiles.profile import (
    DeviceProfile,
    Precision,
    load_profile,
    profile_names,
)

# Windows reports up to 5 % more than Linux; GPUs of one name differ by a third or more.
_SIZE_TOLERANCE = 0.08


@dataclass(frozen=True)
class DriverFacts:
    """GPU properties that the driver reports.

    ``bandwidth_bytes_per_s`` is None where the driver does not report it.
    """

    title: str
    capability: tuple[int, int]
    total_bytes: int
    multiprocessors: int
    bandwidth_bytes_per_s: int | None = None


def local_profile(device: str) -> DeviceProfile:
    """Return the profile of a device of this machine.

    ``device`` is ``"cpu"``, ``"cuda"`` or ``"cuda:0"``. A GPU that has a packaged profile keeps its
    figures, with the driver's memory size. Any other takes the priors of the GPU nearest in compute
    capability, scaled by its multiprocessors, which underestimates the tensor cores of data center
    GPUs before Hopper.

    Raises:
        UsageError: The device is not present.
    """
    if device == "cpu":
        return _host()
    return profile_from_driver(_read_cuda(device))


def find_profile(device: str) -> DeviceProfile:
    """Return the profile of a local device, or the packaged one of that name.

    See `local_profile` and `load_profile`.

    Raises:
        UsageError: It is neither a present device nor a profile's name.
    """
    is_local = device == "cpu" or device.partition(":")[0] == "cuda"
    return local_profile(device) if is_local else load_profile(device)


def profile_from_driver(facts: DriverFacts) -> DeviceProfile:
    """Return the profile of a GPU from the properties that its driver reports."""
    for name in profile_names():
        known = load_profile(name)
        if facts.title in known.device_names and _same_size(known, facts):
            return known.model_copy(update=_size_facts(facts))
    return _scaled_profile(_nearest_profile(facts), facts)


def _size_facts(facts: DriverFacts) -> dict[str, Any]:
    return {"total_bytes": facts.total_bytes, "multiprocessors": facts.multiprocessors}


def _scaled_profile(nearest: DeviceProfile, facts: DriverFacts) -> DeviceProfile:
    """Scale the nearest packaged profile to a GPU that has none."""
    share = facts.multiprocessors / nearest.multiprocessors
    supports: tuple[Precision, ...] = tuple(
        p for p in nearest.supports if facts.capability >= _MIN_CAPABILITIES[p]
    )
    return nearest.model_copy(
        update={
            **_size_facts(facts),
            "name": re.sub(r"[^a-z0-9]+", "-", facts.title.lower()).strip("-"),
            "title": facts.title,
            "aliases": (),
            "device_names": (facts.title,),
            "compute_capability": ".".join(map(str, facts.capability)),
            "supports": supports,
            "flops": {p: int(nearest.flops[p] * share) for p in supports},
            "bandwidth_bytes_per_s": (
                facts.bandwidth_bytes_per_s or int(nearest.bandwidth_bytes_per_s * share)
            ),
            "provenance": {},
        }
    )


_MIN_CAPABILITIES: dict[Precision, tuple[int, int]] = {
    "fp32": (0, 0),
    "fp16": (0, 0),
    "tf32": (8, 0),
    "bf16": (8, 0),
}


def _same_size(known: DeviceProfile, facts: DriverFacts) -> bool:
    return abs(facts.total_bytes - known.total_bytes) <= _SIZE_TOLERANCE * known.total_bytes


def _nearest_profile(facts: DriverFacts) -> DeviceProfile:
    """Return the packaged GPU profile nearest in compute capability, then in size."""

    def distance(profile: DeviceProfile) -> tuple[int, int]:
        (major, minor), (its_major, its_minor) = facts.capability, profile.capability
        apart = abs(10 * (major - its_major) + minor - its_minor)
        return apart, abs(profile.multiprocessors - facts.multiprocessors)

    profiles = [load_profile(name) for name in profile_names()]
    return min((card for card in profiles if card.kind == "cuda"), key=distance)


def _host() -> DeviceProfile:
    common = load_profile("cpu")
    cores = os.cpu_count() or 1
    return common.model_copy(
        update={
            "title": f"Host CPU with {cores} cores",
            "aliases": (),
            "multiprocessors": cores,
            "total_bytes": total_host_bytes(),
            "flops": {
                p: rate * cores // common.multiprocessors for p, rate in common.flops.items()
            },
            "provenance": {},
        }
    )


def _read_cuda(device: str) -> DriverFacts:
    import torch

    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"{device!r} has no device profile", hint="use cpu, cuda or cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or (torch.cuda.current_device() if count else 0))
    if index >= count:
        raise UsageError(
            f"there is no device {device!r} (CUDA devices on this machine: {count})",
            hint=f"plan for a device that is not present by its name: {', '.join(profile_names())}",
        )
    properties = torch.cuda.get_device_properties(index)
    # Not every release reports the memory's clock (kHz) and bus (bits).
    clock, bus = (getattr(properties, f"memory_{x}", 0) for x in ("clock_rate", "bus_width"))
    return DriverFacts(
        title=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        bandwidth_bytes_per_s=2 * clock * 1000 * bus // 8 or None,
    )
