"""Choose the devices and the precision of a job, and share what it may use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from lowtide.core.errors import UsageError
from lowtide.core.option import Precision
from lowtide.core.torch_state import loaded_torch, thread_count
from lowtide.memory.budget import Budget
from lowtide.models import ModelDescriptor


def resolve_device(name: str) -> str:
    """Resolve ``"auto"`` to the first CUDA device or the CPU, and check other names.

    Raises:
        UsageError: This machine does not have the device.
    """
    import torch

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


def resolve_devices(names: Sequence[str]) -> list[str]:
    """Resolve the names of the devices that a job runs on.

    Raises:
        UsageError: This machine does not have one of them, or a CPU is combined with GPUs.
    """
    names = [resolve_device(name) for name in names]
    if len({name.partition(":")[0] for name in names}) > 1:
        raise UsageError(
            "--devices cannot combine GPUs with the CPU: one cannot run what the other can",
            hint="run two commands, each on a part of the images",
        )
    return names


def budget_share(budget: Budget, devices: Sequence[str]) -> Budget:
    """Return the share of ``budget`` for each worker on ``devices``: equal parts."""
    workers = max(devices.count(device) for device in devices)
    return replace(
        budget,
        device_bytes=budget.device_bytes // workers,
        host_bytes=budget.host_bytes // len(devices),
        disk_bytes=budget.disk_bytes // len(devices),
    )


@contextlib.contextmanager
def divide_threads(workers: int, total: int | None = None) -> Iterator[int]:
    """Set PyTorch's threads to a share for each of ``workers`` and yield it.

    The share is of ``total`` threads, by default of the current ones. This process keeps it until
    the context ends, since measurements depend on the number of threads.
    """
    before = thread_count()
    wanted = max(1, (total or before) // workers)
    if wanted == before or (torch := loaded_torch()) is None:
        yield wanted
        return
    torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


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
    import torch

    if requested == "auto":
        if device == "cpu":
            return "fp32"
        return preferred_precision(model, torch.cuda.get_device_capability(device))
    allowed = castable_precisions(model)
    if requested not in allowed:
        raise UsageError(
            f"{model.name} ({model.architecture}) does not run in {requested}",
            hint=f"--precision {' or '.join(sorted(allowed))}",
        )
    return requested
