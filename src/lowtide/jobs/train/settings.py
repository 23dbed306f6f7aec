"""Settings of a training step to plan, validated; imports nothing heavy by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option
from lowtide.jobs.engine.settings import validate_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.memory.training.meta_build import Inputs
    from lowtide.memory.training.options import MakeStep

_STEP = "Training step"
_SIZE = re.compile(r"(\d+)(?:[x×](\d+))?")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training step, except the model and the device.

    ``size`` is (H, W), or text as in `parse_size`. ``inputs`` are shapes as in `parse_inputs`,
    ``channels`` those of images; without either the model's ``example_inputs(batch, size)`` is
    called, or images have the channels of its first convolution. ``optimizer`` ``"auto"`` is AdamW
    in the form that PyTorch takes by default. A low ``precision`` is autocast over fp32 weights.
    ``validation_batch`` images of ``validation_size`` (``size`` by default) are run after the step.

    Attributes:
        batch: Images in a micro-batch.
        size: Size of the images, 256 or WIDTHxHEIGHT. Default: 256, for ldm4ts 224.
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

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    batch: Annotated[Count, Option(_STEP)] = 4
    size: Annotated[tuple[Count, Count] | None, Option(_STEP, metavar="SIZE")] = None
    inputs: Annotated[
        tuple[str, ...], Option(_STEP, flags=("--input",), metavar="SHAPE", repeats=True)
    ] = ()
    channels: Annotated[Count | None, Option(_STEP)] = None
    optimizer: Annotated[
        Literal["adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"] | Literal["auto"],
        Option(_STEP),
    ] = "auto"
    checkpointing: Annotated[Literal["none", "selective", "full"], Option(_STEP)] = "none"
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Option(_STEP)] = "fp32"
    ema: Annotated[bool, Option(_STEP)] = False
    accumulate: Annotated[Count, Option(_STEP)] = 1
    validation_batch: Annotated[Count | None, Option(_STEP, metavar="N")] = None
    validation_size: Annotated[tuple[Count, Count] | None, Option(_STEP, metavar="SIZE")] = None

    @classmethod
    def of(cls, **values: Any) -> TrainSettings:
        """Build settings from keywords; raises `UsageError` for invalid ones."""
        for name in ("size", "validation_size"):
            if isinstance(values.get(name), str):
                values[name] = parse_size(values[name])
        settings = validate_settings(cls, values)
        if settings.inputs and settings.channels is not None:
            raise UsageError(
                "--input and --channels contradict each other", hint="--input includes the channels"
            )
        if settings.validation_size is not None and settings.validation_batch is None:
            raise UsageError(
                "--validation-size without --validation-batch", hint="add --validation-batch 1"
            )
        return settings

    def make_step(
        self,
        model_of: Callable[[tuple[int, int]], nn.Module],
        size: tuple[int, int],
        on_cuda: bool,
        loss: Callable[[Any], Tensor] | None,
    ) -> MakeStep:
        """Return a function that builds the `TrainingStep` for a batch size and (H, W).

        ``model_of`` returns the model for images of a size, and ``size`` is the requested one.
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
            validation = make_inputs(
                model_of(size), self.validation_batch, self.validation_size or size, make
            )

        def step(batch: int, size: tuple[int, int]) -> TrainingStep:
            return TrainingStep(
                make_inputs(model_of(size), batch, size, make),
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
