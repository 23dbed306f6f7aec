"""Device profiles: figures of one kind of device; those packaged with Lowtide, by name."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.core.errors import UsageError, closest_name

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class Workspaces(BaseModel):
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
    workspaces: Workspaces
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
