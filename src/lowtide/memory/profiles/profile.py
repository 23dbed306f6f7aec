"""Device profiles: figures of one kind of device, packaged by name or of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.core.errors import UsageError, closest_name
from lowtide.memory.process_memory import total_host_bytes

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class LibraryWorkspaces(BaseModel):
    """Workspace that libraries take through PyTorch's CUDA allocator.

    ``cublas_bytes`` and ``cublaslt_bytes`` are per handle and stream. A convolution's workspace is
    a multiple of its output: ``conv_multiple`` for contiguous tensors,
    ``conv_channels_last_multiple`` for channels-last ones, ``conv_upper_multiple`` as the upper
    bound of both; none is taken to exceed ``conv_cap_bytes``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cublas_bytes: int = Field(ge=0)
    cublas_upper_bytes: int = Field(ge=0)
    cublaslt_bytes: int = Field(ge=0)
    conv_multiple: float = Field(ge=0)
    conv_channels_last_multiple: float = Field(ge=0)
    conv_upper_multiple: float = Field(ge=0)
    conv_cap_bytes: int = Field(gt=0)

    def conv_bytes(self, output_bytes: int, *, channels_last: bool = False) -> tuple[int, int]:
        """Return the (expected, upper) workspace bytes of a convolution.

        ``output_bytes`` are those of its output.
        """
        multiple = self.conv_channels_last_multiple if channels_last else self.conv_multiple
        expected, upper = (
            min(int(times * output_bytes), self.conv_cap_bytes)
            for times in (multiple, self.conv_upper_multiple)
        )
        return expected, upper

    @property
    def blas_bytes(self) -> tuple[int, int]:
        """(Expected, upper) bytes that matrix products keep, per handle and stream."""
        return self.cublas_bytes, self.cublas_upper_bytes + self.cublaslt_bytes


class DeviceProfile(BaseModel):
    """Memory sizes and speeds of one kind of device.

    Attributes:
        total_bytes: What the driver reports on Linux, not the figure on the box: 0.2 to 0.6 GiB
            less than under Windows on consumer GPUs.
        context_bytes: What a process takes outside the allocator.
        desktop_bytes: What the display usually holds.
        flops: Dense operations a second with fp32 accumulation, two to a multiply-add.
        bandwidth_bytes_per_s: Of the device's own memory.
        pcie_bytes_per_s: Of one direction to the host; None for the host itself.
        provenance: Source of each figure of a packaged profile, for its readers: ``known`` was read
            from a driver, source code or a measurement, ``datasheet`` is published by the vendor,
            ``prior`` is an educated guess that a probe on the device should replace.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    aliases: tuple[str, ...] = ()
    title: str
    device_names: tuple[str, ...] = ()
    kind: Literal["cpu", "cuda"]
    compute_capability: str | None = Field(default=None, pattern=r"^\d+\.\d$")
    multiprocessors: int = Field(gt=0)
    total_bytes: int = Field(gt=0)
    context_bytes: int = Field(ge=0)
    context_upper_bytes: int = Field(ge=0)
    desktop_bytes: int = Field(ge=0)
    workspaces: LibraryWorkspaces
    bandwidth_bytes_per_s: int = Field(gt=0)
    flops: dict[Precision, int]
    pcie_bytes_per_s: int | None = Field(default=None, gt=0)
    supports: tuple[Precision, ...]
    provenance: dict[str, dict[str, str]] = {}

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability as (major, minor); (0, 0) for the CPU."""
        if self.compute_capability is None:
            return 0, 0
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)


def profile_names() -> tuple[str, ...]:
    """Return the names of all packaged profiles, smallest device first."""
    return tuple(_catalog())


def load_profile(name: str) -> DeviceProfile:
    """Load the packaged profile with a name, alias or title, in any case and spelling.

    ``"rtx4090-24gb"``, ``"rtx4090"``, ``"RTX 4090"`` and ``"NVIDIA GeForce RTX 4090 24 GB"`` are
    the same.

    Raises:
        UsageError: The name is unknown; the message lists the names.
    """
    spelled = _spellings()
    if found := spelled.get(_normalized(name)):
        return _catalog()[found]
    meant = closest_name(_normalized(name), spelled)
    hint = f"did you mean {spelled[meant]}?" if meant else "use one of these names"
    names = ", ".join(profile_names())
    raise UsageError(f"no device profile {name!r}; available: {names}", hint=hint)


@cache
def _catalog() -> dict[str, DeviceProfile]:
    folder = resources.files("lowtide.memory.profiles") / "data"
    profiles = [
        DeviceProfile.model_validate_json(entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    ]
    profiles.sort(key=lambda profile: (profile.kind, profile.total_bytes, profile.name))
    return {profile.name: profile for profile in profiles}


@cache
def _spellings() -> dict[str, str]:
    return {
        _normalized(spelling): profile.name
        for profile in _catalog().values()
        for spelling in (profile.name, profile.title, *profile.aliases)
    }


def _normalized(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


# Windows reports up to 5 % more than Linux; GPUs of one name differ by a third or more.
_SIZE_TOLERANCE = 0.08


@dataclass(frozen=True)
class GpuDriverFacts:
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


def profile_from_driver(facts: GpuDriverFacts) -> DeviceProfile:
    """Return the profile of a GPU from the properties that its driver reports."""
    for name in profile_names():
        known = load_profile(name)
        if facts.title in known.device_names and _same_size(known, facts):
            return known.model_copy(update=_size_facts(facts))
    return _scaled_profile(_nearest_profile(facts), facts)


def _size_facts(facts: GpuDriverFacts) -> dict[str, Any]:
    return {"total_bytes": facts.total_bytes, "multiprocessors": facts.multiprocessors}


def _scaled_profile(nearest: DeviceProfile, facts: GpuDriverFacts) -> DeviceProfile:
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


def _same_size(known: DeviceProfile, facts: GpuDriverFacts) -> bool:
    return abs(facts.total_bytes - known.total_bytes) <= _SIZE_TOLERANCE * known.total_bytes


def _nearest_profile(facts: GpuDriverFacts) -> DeviceProfile:
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


def _read_cuda(device: str) -> GpuDriverFacts:
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
    return GpuDriverFacts(
        title=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        bandwidth_bytes_per_s=2 * clock * 1000 * bus // 8 or None,
    )
