"""Choose the devices and the precision of a job on this machine."""

from __future__ import annotations

from typing import Literal

import torch

from lowtide.core.errors import UsageError
from lowtide.core.precision import Precision
from lowtide.jobs.settings import UpscaleSettings
from lowtide.models import ModelDescriptor
from lowtide.models.quantize import FP8_CAPABILITY


def resolve_device(name: str) -> str:
    """Resolve ``"auto"`` to the first CUDA device or the CPU, and check other names.

    Raises:
        UsageError: This machine does not have the device.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"--device {name!r} is not a device of this machine",
            hint="--device cpu or --device cuda:0; `lowtide plan` also takes GPUs by name",
        )
    if device.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices",
            hint="`lowtide doctor` lists the devices; --device cpu always works",
        )
    return f"cuda:{device.index or 0}"


def resolve_devices(settings: UpscaleSettings) -> list[str]:
    """Return the names of the devices that a job runs on.

    Raises:
        UsageError: This machine does not have one of them, or a CPU is combined with GPUs.
    """
    names = [resolve_device(name) for name in settings.devices or (settings.one_device,)]
    if len({name.partition(":")[0] for name in names}) > 1:
        raise UsageError(
            "--devices cannot combine GPUs with the CPU: one cannot run what the other can",
            hint="run two commands, each on a part of the images",
        )
    return names


def castable_precisions(model: ModelDescriptor) -> list[Precision]:
    """Return the precisions that a model's weights can be cast to."""
    allowed: list[Precision] = ["fp32"]
    if model.supports_bfloat16:
        allowed.append("bf16")
    if model.supports_half:
        allowed.append("fp16")
    return allowed


def preferred_precision(model: ModelDescriptor, capability: tuple[int, int]) -> Precision:
    """Return the lower precision that gains on this compute capability, or fp32."""
    low: Precision = "bf16" if capability >= (8, 0) else "fp16"
    return low if low in castable_precisions(model) else "fp32"


def resolve_precision(
    requested: Literal["auto"] | Precision, model: ModelDescriptor, device: str
) -> Precision:
    """Return the precision to run ``model`` in on ``device``.

    ``auto`` is bf16, or fp16 where the model allows it, on GPUs that gain; fp32 on the CPU.
    """
    if requested == "auto":
        if device == "cpu":
            return "fp32"
        return preferred_precision(model, torch.cuda.get_device_capability(device))
    allowed: list[Precision] = [*castable_precisions(model), "int8"]
    if requested == "fp8" and "bf16" in allowed:
        _check_fp8(device)
        return requested
    if requested not in allowed:
        raise UsageError(
            f"{model.name} ({model.architecture}) does not run in {requested}",
            hint=f"--precision {' or '.join(sorted(allowed))}",
        )
    return requested


def _check_fp8(device: str) -> None:
    """Raise `UsageError` for a device that has no fp8 matrix multiplication."""
    if device != "cpu" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return
    need = ".".join(map(str, FP8_CAPABILITY))
    raise UsageError(
        f"{device} cannot multiply in fp8: that needs a GPU of compute capability {need} or higher",
        hint="--precision bf16, or int8",
    )
