"""Settings of a training step to plan, validated; imports nothing heavy by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option
from lowtide.jobs.engine.settings import JobSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.memory.training.meta_build import Inputs
    from lowtide.memory.training.options import MakeStep

_STEP, _DEVICE, _RUN = "Training step", "Device", "Run"
OptimizerName = Literal["auto", "adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"]
_SIZE = re.compile(r"(\d+)(?:[x×](\d+))?")


@dataclass(frozen=True, kw_only=True)
class TrainRunSettings(JobSettings):
    """Settings of any training that are not in its configuration.

    Attributes:
        budget: Memory that a step may take: 6GiB, 80% of what is free, or auto. The batch is split
            into as many micro-batches as needed. If memory runs out all the same, the step is
            repeated with less.
        device: auto, cpu, cuda:0, ...
        dry_run: Predict memory and time, and stop. Two steps are run and timed, but for a GPU that
            need not be present, such as rtx3060-12gb, whose time is estimated.
        accept_changed_data: Resume although the training files have changed since the run began.
    """

    budget: Annotated[str | int, Option(_RUN, metavar="BYTES")] = "auto"
    device: Annotated[str, Option(_RUN)] = "auto"
    dry_run: Annotated[bool, Option(_RUN)] = False
    accept_changed_data: Annotated[bool, Option(_RUN)] = False


@dataclass(frozen=True, kw_only=True)
class TrainPlanSettings(JobSettings):
    """Settings of the plan of any training step.

    Attributes:
        device: A GPU by name, such as rtx3060-12gb, which need not be present; cpu; cuda:0; or
            auto, the CUDA device of this machine.
        budget: Memory for the process: 6GiB, 80% of what a display leaves, or auto: all of that.
        plot: Plot the step's memory over time to a .png or .svg file.
    """

    device: Annotated[str, Option(_DEVICE)] = "auto"
    budget: Annotated[str | int, Option(_DEVICE, flags=("-b", "--budget"))] = "auto"
    plot: Annotated[Path | None, Option("Output", metavar="FILE")] = None


class TrainKeywords(TypedDict, total=False):
    """Keywords of both plans: the fields of `TrainSettings`, except the device and the plot."""

    batch: int
    size: str | tuple[int, int] | None
    inputs: Sequence[str]
    channels: int | None
    optimizer: OptimizerName
    checkpointing: Literal["none", "selective", "full"]
    precision: Literal["fp32", "bf16", "fp16"]
    ema: bool
    accumulate: int
    validation_batch: int | None
    validation_size: str | tuple[int, int] | None
    budget: str | int


@dataclass(frozen=True, kw_only=True)
class TrainSettings(TrainPlanSettings):
    """Settings of a training step and of its plan, except the model.

    ``size`` is (H, W), or text as in `parse_size`. ``inputs`` are shapes as in `parse_inputs`,
    ``channels`` those of images; without either the model's ``example_inputs(batch, size)`` is
    called, or images have the channels of its first convolution. ``optimizer`` ``"auto"`` is AdamW
    in the form that PyTorch takes by default. A low ``precision`` is autocast over fp32 weights.
    ``validation_batch`` images of ``validation_size`` (``size`` by default) are run after the step.

    Attributes:
        batch: Images in a micro-batch.
        size: Size of the images, 256 or WIDTHxHEIGHT. Default: 256.
        inputs: Shape of an input without the batch dimension: 3,h,w or 4,h/8,w/8 or 77,768 or
            :int64. Once for each input, in order. Default: the model's own example_inputs(batch,
            size), or images.
        channels: Channels of the images. Default: those of the model's first convolution.
        optimizer: auto is AdamW in the form that PyTorch takes by default on the device.
        checkpointing: What the backward pass recomputes.
        precision: bf16 and fp16 are autocast over fp32 weights.
        ema: Keep a moving average of the weights on the device.
        accumulate: Micro-batches in a step.
        validation_batch: Images of a validation pass after the step. Default: no validation pass.
        validation_size: Size of the validation images. Default: --size.
    """

    batch: Annotated[Count, Option(_STEP, flags=("--batch", "--batch-size"))] = 4
    size: Annotated[tuple[Count, Count] | None, Option(_STEP, metavar="SIZE")] = None
    inputs: Annotated[
        tuple[str, ...], Option(_STEP, flags=("--input",), metavar="SHAPE", repeats=True)
    ] = ()
    channels: Annotated[Count | None, Option(_STEP)] = None
    optimizer: Annotated[
        OptimizerName,
        Option(_STEP),
    ] = "auto"
    checkpointing: Annotated[Literal["none", "selective", "full"], Option(_STEP)] = "none"
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Option(_STEP)] = "fp32"
    ema: Annotated[bool, Option(_STEP)] = False
    accumulate: Annotated[Count, Option(_STEP)] = 1
    validation_batch: Annotated[Count | None, Option(_STEP, metavar="N")] = None
    validation_size: Annotated[tuple[Count, Count] | None, Option(_STEP, metavar="SIZE")] = None

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; sizes may be text, as `parse_size` reads it."""
        for name in ("size", "validation_size"):
            if isinstance(values.get(name), str):
                values[name] = parse_size(values[name])
        return super().of(**values)

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        if self.inputs and self.channels is not None:
            raise UsageError(
                "--input and --channels contradict each other", hint="--input includes the channels"
            )
        if self.validation_size is not None and self.validation_batch is None:
            raise UsageError(
                "--validation-size without --validation-batch", hint="add --validation-batch 1"
            )

    def make_step(
        self,
        model: nn.Module,
        size: tuple[int, int],
        on_cuda: bool,
        loss: Callable[[Any], Tensor] | None,
    ) -> MakeStep:
        """Return a function that builds the `TrainingStep` of ``model`` for a batch and (H, W).

        ``size`` is the requested one.
        """
        from lowtide.memory.tracing.steps import TrainingStep
        from lowtide.memory.training.meta_build import make_inputs
        from lowtide.memory.training.options import AUTOCAST_DTYPES

        make = self._inputs()
        optimizer = self.optimizer
        if optimizer == "auto":
            optimizer = "adamw-foreach" if on_cuda else "adamw"
        validation = None
        if self.validation_batch is not None:
            sides = self.validation_size or size
            validation = make_inputs(model, self.validation_batch, sides, make)

        def step(batch: int, size: tuple[int, int]) -> TrainingStep:
            return TrainingStep(
                make_inputs(model, batch, size, make),
                optimizer=optimizer,
                loss=loss,
                checkpointing=self.checkpointing,
                autocast=AUTOCAST_DTYPES.get(self.precision),
                accumulate=self.accumulate,
                ema=self.ema,
                validation=validation,
            )

        return step

    def _inputs(self) -> Inputs | None:
        from lowtide.memory.training.meta_build import image_inputs, parse_inputs

        if self.inputs:
            return parse_inputs(self.inputs)
        return None if self.channels is None else image_inputs(self.channels)


def parse_size(text: str) -> tuple[int, int]:
    """Parse ``"256"`` or, width first, ``"320x240"`` to (H, W).

    Raises:
        UsageError: The text has another form.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or "0" in (match[1], match[2]):
        raise UsageError(f"size {text!r} is not a number of pixels", hint="--size 256 or 320x240")
    width, height = match[1], match[2] or match[1]
    return int(height), int(width)
