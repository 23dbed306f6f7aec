"""Device profiles of the CPU and the GPUs of this machine."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from lowtide.core.errors import UsageError
from lowtide.memory.meter import total_host_bytes
from lowtide.memory.profiles.profile import DeviceProfile, Precision, Provenance
from lowtide.memory.profiles.shipped import load_profile, profile_names

_ARCHITECTURES = {
    6: "pascal",
    7: "volta",
    8: "ampere",
    9: "hopper",
    10: "blackwell",
    11: "blackwell",
    12: "blackwell",
}
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
            return _with_facts(known, facts, {}, known.provenance)
    return _scaled_profile(_nearest_profile(facts), facts)


def _scaled_profile(nearest: DeviceProfile, facts: DriverFacts) -> DeviceProfile:
    """Scale the nearest packaged profile to a GPU that has none."""
    share = facts.multiprocessors / nearest.multiprocessors
    supports: list[Precision] = [
        p for p in nearest.supports if facts.capability >= _MIN_CAPABILITIES[p]
    ]
    scaled = Provenance(kind="prior", source=f"as {nearest.title}, by number of multiprocessors")
    driver = Provenance(kind="known", source="memory clock and bus width of the driver")
    bandwidth = facts.bandwidth_bytes_per_s or int(nearest.bandwidth_bytes_per_s * share)
    changes = {
        "name": re.sub(r"[^a-z0-9]+", "-", facts.title.lower()).strip("-"),
        "title": facts.title,
        "aliases": (),
        "device_names": (facts.title,),
        "architecture": architecture_of(facts.capability),
        "compute_capability": ".".join(map(str, facts.capability)),
        "supports": supports,
        "flops": {p: int(nearest.flops[p] * share) for p in supports},
        "bandwidth_bytes_per_s": bandwidth,
    }
    provenance = {
        **{figure: _as_prior(p, nearest) for figure, p in nearest.provenance.items()},
        "flops": scaled,
        "bandwidth_bytes_per_s": driver if facts.bandwidth_bytes_per_s else scaled,
    }
    return _with_facts(nearest, facts, changes, provenance)


_MIN_CAPABILITIES: dict[Precision, tuple[int, int]] = {
    "fp32": (0, 0),
    "fp16": (0, 0),
    "tf32": (8, 0),
    "bf16": (8, 0),
}


def architecture_of(capability: tuple[int, int]) -> str:
    """Return a compute capability's architecture name.

    One that is not listed takes the name of the nearest older one.
    """
    if capability == (8, 9):
        return "ada"
    if capability == (7, 5):
        return "turing"
    return _ARCHITECTURES[min(max(capability[0], min(_ARCHITECTURES)), max(_ARCHITECTURES))]


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


def _as_prior(provenance: Provenance, nearest: DeviceProfile) -> Provenance:
    return Provenance(kind="prior", source=f"as {nearest.title}: {provenance.source}")


def _with_facts(
    profile: DeviceProfile,
    facts: DriverFacts,
    changes: dict[str, Any],
    provenance: dict[str, Provenance],
) -> DeviceProfile:
    driver = Provenance(kind="known", source="read from the driver")
    return DeviceProfile.model_validate(
        {
            **dict(profile),
            **changes,
            "total_bytes": facts.total_bytes,
            "multiprocessors": facts.multiprocessors,
            "expandable_segments": profile.expandable_segments and sys.platform == "linux",
            "provenance": {**provenance, "total_bytes": driver, "multiprocessors": driver},
        }
    )


def _host() -> DeviceProfile:
    common = load_profile("cpu")
    cores = os.cpu_count() or 1
    system = Provenance(kind="known", source="read from the operating system")
    scaled = Provenance(kind="prior", source=f"{common.title}, by the number of cores")
    return DeviceProfile.model_validate(
        {
            **dict(common),
            "title": f"Host CPU with {cores} cores",
            "aliases": (),
            "multiprocessors": cores,
            "total_bytes": total_host_bytes(),
            "flops": {
                p: rate * cores // common.multiprocessors for p, rate in common.flops.items()
            },
            "provenance": {
                **common.provenance,
                "multiprocessors": system,
                "total_bytes": system,
                "flops": scaled,
            },
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
