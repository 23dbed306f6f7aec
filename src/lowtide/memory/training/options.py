"""Memory-saving options of a training step, mildest change first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.core.units import format_bytes
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.memory.tracing.steps import Optimizer, TraceableStep, TrainingStep, tensors_of

Accuracy = Literal["exact", "changes results"]
MakeStep = Callable[[int, tuple[int, int]], TrainingStep]

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE_FACTORS = (0.75, 0.5, 0.25)
_NO_FACTORY = "make_step is not given, so the inputs cannot be changed"
_DIFFUSION_STEPS_NOTE = (
    "a training step draws one noise level for each image: none of its tensors has the steps"
    " as a dimension"
)


class StepMemorySettings(BaseModel):
    """Settings that decide the memory of a training step, besides the model.

    ``batch`` images of ``size`` (height, width) are a micro-batch, and ``accumulate`` micro-batches
    a step. ``ema`` says where the average of the weights is kept, ``validation`` how many images
    the validation pass after the step takes, None without one.
    """

    model_config = ConfigDict(frozen=True)

    batch: int | None
    size: tuple[int, int] | None
    accumulate: int
    optimizer: Optimizer
    autocast: Literal["bf16", "fp16"] | None
    checkpointing: Checkpointing
    ema: Literal["no", "device", "host"]
    validation: int | None

    @classmethod
    def from_step(
        cls, step: TrainingStep, batch: int | None, size: tuple[int, int] | None
    ) -> StepMemorySettings:
        """Return the settings of ``step``; batch and size default to its first tensor's."""
        shapes = [tuple(tensor.shape) for tensor in tensors_of(list(step.inputs))]
        if batch is None and shapes and shapes[0]:
            batch = shapes[0][0]
        if size is None and shapes and len(shapes[0]) == 4:
            size = shapes[0][2], shapes[0][3]
        names = {dtype: name for name, dtype in AUTOCAST_DTYPES.items()}
        return cls.model_validate(
            dict(
                batch=batch,
                size=size,
                accumulate=step.accumulate,
                optimizer=step.optimizer,
                autocast=names.get(step.autocast) if step.autocast else None,
                checkpointing=step.checkpointing,
                ema="device" if step.ema else "no",
                validation=_image_count(step.validation) if step.validation else None,
            )
        )

    def __str__(self) -> str:
        size = f" of {size_text(self.size)}" if self.size else ""
        kept = "no" if self.checkpointing == "none" else self.checkpointing
        times = f", {self.accumulate} times" if self.accumulate > 1 else ""
        ema = f", EMA on the {self.ema}" if self.ema != "no" else ""
        return (
            f"batch {self.batch}{size}{times}, {self.optimizer}, {self.autocast or 'no'} autocast,"
            f" {kept} checkpointing{ema}"
        )


def size_text(size: tuple[int, int]) -> str:
    """Format (height, width) as ``width×height``."""
    return f"{size[1]}×{size[0]}"


def change_settings(
    step: TrainingStep,
    requested: StepMemorySettings,
    settings: StepMemorySettings,
    make_step: MakeStep | None,
) -> TrainingStep:
    """Return ``step``, whose settings are ``requested``, changed to ``settings``.

    An EMA on the host takes no device memory, and a third micro-batch finds the memory as the
    second did, so that no more than two are run.
    """
    if (settings.batch, settings.size) != (requested.batch, requested.size):
        assert make_step is not None and settings.batch is not None and settings.size is not None
        made = make_step(settings.batch, settings.size)
        step = dataclasses.replace(step, inputs=made.inputs, keywords=made.keywords, loss=made.loss)
    validation = step.validation
    if validation is not None and settings.validation != requested.validation:
        validation = tuple(_first_images(value, settings.validation or 1) for value in validation)
    return dataclasses.replace(
        step,
        optimizer=settings.optimizer,
        checkpointing=settings.checkpointing,
        autocast=AUTOCAST_DTYPES[settings.autocast] if settings.autocast else None,
        accumulate=min(settings.accumulate, 2),
        ema=settings.ema == "device",
        validation=validation,
    )


@dataclasses.dataclass(frozen=True)
class OptionChange:
    """One option: the fields of `StepMemorySettings` it sets, or why it does not apply.

    ``free`` ones cost neither time nor accuracy, and stay even where another part of the step is
    the peak for now. Those ``intermediate`` two others are skipped once the step fits.
    """

    name: str
    values: dict[str, Any]
    refusal: str | None = None
    accuracy: Accuracy = "exact"
    free: bool = False
    intermediate: bool = False
    note: str = ""


def _option(
    name: str, values: dict[str, Any], *refusals: tuple[object, str], **more: Any
) -> OptionChange:
    """Return an option that the first of ``refusals`` whose condition holds rules out."""
    return OptionChange(name, values, next((why for holds, why in refusals if holds), None), **more)


def option_changes(
    now: StepMemorySettings,
    step: TraceableStep,
    model: nn.Module,
    profile: DeviceProfile,
    *,
    resizable: bool,
    multiple: int,
) -> Iterator[OptionChange]:
    """Iterate over all options of a step with settings ``now``, in the order of trial.

    Exact ones come first, except that autocast, which also saves time, comes before checkpointing
    and smaller batches; smaller images come last.
    """
    weights = list(model.parameters())
    yield _option(
        "fused optimizer",
        {"optimizer": "adamw-fused"},
        (now.optimizer != "adamw-foreach", f"{now.optimizer} does not copy all gradients at once"),
        free=True,
    )
    yield _option(
        "validation one by one",
        {"validation": 1},
        (now.validation is None, "there is no validation pass"),
        (now.validation == 1, "validation takes one image at a time already"),
        (tensors_of(dict(step.keywords)), "its keyword tensors are those of the training batch"),
        free=True,
    )
    average = format_bytes(sum(weight.nbytes for weight in weights if weight.requires_grad))
    yield _option(
        "EMA on the host",
        {"ema": "host"},
        (now.ema != "device", "no EMA of the weights is kept on the device"),
        (profile.kind == "cpu", "on the CPU the host is the device"),
        note=f"{average} of host memory; weights are copied to the host after each step",
    )
    low = next((name for name in AUTOCAST_DTYPES if name in profile.supports), None)
    yield _option(
        f"{low or 'low precision'} autocast",
        {"autocast": low},
        (
            weights and weights[0].dtype in AUTOCAST_DTYPES.values(),
            "the weights are in low precision already",
        ),
        (now.autocast, f"{now.autocast} autocast is requested already"),
        (low is None, f"{profile.title} does not support low precision"),
        accuracy="changes results",
        note="needs a loss scale" if low == "fp16" else "",
    )
    normalizes = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    for how, milder in (("selective", ("none",)), ("full", ("none", "selective"))):
        yield _option(
            f"{how} checkpointing",
            {"checkpointing": how},
            (
                now.checkpointing not in milder,
                f"{now.checkpointing} checkpointing is requested already",
            ),
            note="running statistics of batch norms are updated twice" if normalizes else "",
        )
    yield from _batch_changes(now, resizable, normalizes)
    yield from _size_changes(now, resizable, multiple)
    yield OptionChange("fewer diffusion steps", {}, note=_DIFFUSION_STEPS_NOTE)


def _batch_changes(
    now: StepMemorySettings, resizable: bool, normalizes: bool
) -> Iterator[OptionChange]:
    if now.batch is None or now.batch == 1 or not resizable:
        refusal = "the batch is 1 already" if now.batch == 1 else _NO_FACTORY
        yield OptionChange("smaller batch, accumulated", {}, refusal)
        return
    batch = now.batch
    while batch > 1:
        largest = batch == now.batch
        # The effective batch stays the same, so only divisors are possible.
        batch = divisors(batch)[-2]
        count = now.batch * now.accumulate // batch
        yield OptionChange(
            f"batch {batch}, accumulate {count}",
            {"batch": batch, "accumulate": count},
            accuracy="changes results" if normalizes else "exact",
            intermediate=not largest and batch > 1,
            note="batch norms see fewer images at once" if normalizes else "",
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _size_changes(
    now: StepMemorySettings, resizable: bool, multiple: int
) -> Iterator[OptionChange]:
    if now.size is None or not resizable:
        yield OptionChange("smaller images", {}, _NO_FACTORY)
        return
    height, width = now.size
    sizes = [
        (int(height * share) // multiple * multiple, int(width * share) // multiple * multiple)
        for share in _SIZE_FACTORS
    ]
    smaller = [size for size in dict.fromkeys(sizes) if min(size) > 0]
    if not smaller:
        refusal = f"{size_text(now.size)} is the smallest size"
        yield OptionChange("smaller images", {}, refusal)
    for size in smaller:
        yield OptionChange(
            f"images of {size_text(size)}",
            {"size": size},
            accuracy="changes results",
            note="the model sees less of each image",
        )


def _image_count(inputs: tuple[Any, ...]) -> int:
    tensors = tensors_of(list(inputs))
    if not tensors or tensors[0].dim() == 0:
        raise UsageError("the first tensor of validation= has no images in its first dimension")
    return tensors[0].shape[0]


def _first_images(value: Any, count: int) -> Any:
    """Return a meta tensor like the first ``count`` images of ``value``."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return torch.empty_like(value[:count], device="meta")
