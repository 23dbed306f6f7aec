"""Memory-saving options of a training step, mildest change first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.memory.tracing.steps import Optimizer, TrainingStep, tensors_of

Accuracy = Literal["exact", "changes results"]
MakeStep = Callable[[int, tuple[int, int]], TrainingStep]

AUTOCAST_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE_FACTORS = (0.75, 0.5, 0.25)
_DIFFUSION_STEPS_NOTE = (
    "a training step draws one noise level for each image: none of its tensors has the steps"
    " as a dimension"
)


class StepSettings(BaseModel):
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
    ) -> StepSettings:
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


@dataclasses.dataclass(frozen=True)
class OptionChange:
    """One option: the fields of `StepSettings` it sets, or why it does not apply.

    ``free`` ones cost neither time nor accuracy, and stay even where another part of the step is
    the peak for now. Those ``intermediate`` two others are skipped once the step fits.
    """

    name: str
    values: dict[str, Any]
    accuracy: Accuracy = "exact"
    free: bool = False
    intermediate: bool = False
    note: str = ""
    unavailable_reason: str | None = None


def size_text(size: tuple[int, int]) -> str:
    """Format (height, width) as ``width×height``."""
    return f"{size[1]}×{size[0]}"


def apply_settings(
    step: TrainingStep, requested: StepSettings, settings: StepSettings, make_step: MakeStep | None
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


def option_changes(
    requested: StepSettings,
    step: TrainingStep,
    model: nn.Module,
    profile: DeviceProfile,
    *,
    low_precision: bool,
    resizable: bool,
    multiple: int,
    sizes: Sequence[tuple[int, int]] | None,
) -> Iterator[OptionChange]:
    """Iterate over all options in the order in which they are tried.

    Exact ones come first, except that autocast, which also saves time, comes before checkpointing
    and smaller batches; smaller images come last.
    """
    yield _fused_optimizer_change(requested)
    yield _validation_change(requested, step)
    yield _ema_change(requested, profile)
    yield _autocast_change(requested, profile, low_precision)
    normalizes = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    yield from _checkpointing_changes(requested, normalizes)
    yield from _batch_changes(requested, resizable, normalizes)
    yield from _size_changes(requested, resizable, multiple, sizes)
    yield OptionChange("fewer diffusion steps", {}, note=_DIFFUSION_STEPS_NOTE)


def _fused_optimizer_change(requested: StepSettings) -> OptionChange:
    refusal = None
    if requested.optimizer != "adamw-foreach":
        refusal = f"{requested.optimizer} does not copy all gradients at once"
    return OptionChange(
        "fused optimizer", {"optimizer": "adamw-fused"}, free=True, unavailable_reason=refusal
    )


def _validation_change(requested: StepSettings, step: TrainingStep) -> OptionChange:
    refusal = None
    if requested.validation is None:
        refusal = "there is no validation pass"
    elif requested.validation == 1:
        refusal = "validation takes one image at a time already"
    elif tensors_of(dict(step.keywords)):
        refusal = "its keyword tensors are those of the training batch"
    return OptionChange(
        "validation one by one", {"validation": 1}, free=True, unavailable_reason=refusal
    )


def _ema_change(requested: StepSettings, profile: DeviceProfile) -> OptionChange:
    refusal = None
    if requested.ema != "device":
        refusal = "no EMA of the weights is kept on the device"
    elif profile.kind == "cpu":
        refusal = "on the CPU the host is the device"
    note = "weights are copied to the host after each step"
    return OptionChange("EMA on the host", {"ema": "host"}, note=note, unavailable_reason=refusal)


def _autocast_change(
    requested: StepSettings, profile: DeviceProfile, low_precision: bool
) -> OptionChange:
    name = next((name for name in AUTOCAST_DTYPES if name in profile.supports), None)
    refusal = None
    if low_precision:
        refusal = "the weights are in low precision already"
    elif requested.autocast is not None:
        refusal = f"{requested.autocast} autocast is requested already"
    elif name is None:
        refusal = f"{profile.title} does not support low precision"
    note = "needs a loss scale" if name == "fp16" else ""
    return OptionChange(
        f"{name or 'low precision'} autocast",
        {"autocast": name},
        "changes results",
        note=note,
        unavailable_reason=refusal,
    )


def _checkpointing_changes(requested: StepSettings, normalizes: bool) -> Iterator[OptionChange]:
    order: tuple[Checkpointing, ...] = ("none", "selective", "full")
    note = "running statistics of batch norms are updated twice" if normalizes else ""
    for how in order[1:]:
        refusal = None
        if order.index(requested.checkpointing) >= order.index(how):
            refusal = f"{requested.checkpointing} checkpointing is requested already"
        yield OptionChange(
            f"{how} checkpointing", {"checkpointing": how}, note=note, unavailable_reason=refusal
        )


def _batch_changes(
    requested: StepSettings, resizable: bool, normalizes: bool
) -> Iterator[OptionChange]:
    batch = requested.batch
    if batch is None or batch == 1 or not resizable:
        refusal = "the batch is 1 already" if batch == 1 else _NO_FACTORY
        yield OptionChange("smaller batch, accumulated", {}, unavailable_reason=refusal)
        return
    accuracy: Accuracy = "changes results" if normalizes else "exact"
    note = "batch norms see fewer images at once" if normalizes else ""
    total = batch * requested.accumulate
    requested_batch = batch
    while batch > 1:
        first = batch == requested_batch
        # The effective batch stays the same, so only divisors are possible.
        batch = max(part for part in range(1, batch // 2 + 1) if batch % part == 0)
        count = total // batch
        yield OptionChange(
            f"batch {batch}, accumulate {count}",
            {"batch": batch, "accumulate": count},
            accuracy,
            intermediate=not first and batch > 1,
            note=note,
        )


_NO_FACTORY = "make_step is not given, so the inputs cannot be changed"


def _size_changes(
    requested: StepSettings, resizable: bool, multiple: int, sizes: Sequence[tuple[int, int]] | None
) -> Iterator[OptionChange]:
    if requested.size is None or not resizable:
        yield OptionChange("smaller images", {}, unavailable_reason=_NO_FACTORY)
        return
    smaller = _smaller_sizes(requested.size, multiple) if sizes is None else sizes
    if not smaller:
        yield OptionChange(
            "smaller images",
            {},
            unavailable_reason=f"{size_text(requested.size)} is the smallest size",
        )
    for size in smaller:
        yield OptionChange(
            f"images of {size_text(size)}",
            {"size": tuple(size)},
            "changes results",
            note="the model sees less of each image",
        )


def _smaller_sizes(size: tuple[int, int], multiple: int) -> list[tuple[int, int]]:
    found = []
    for share in _SIZE_FACTORS:
        height, width = (int(side * share) // multiple * multiple for side in size)
        if min(height, width) > 0 and (height, width) not in found:
            found.append((height, width))
    return found


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
