"""Settings of a training step to plan, validated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.core.errors import UsageError
from lowtide.jobs.settings import validate_settings
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.memory.tracing.steps import Optimizer, TrainingStep
from lowtide.memory.training.fit_search import MakeStep
from lowtide.memory.training.meta_build import Inputs, image_inputs, make_inputs, parse_inputs
from lowtide.memory.training.options import AUTOCAST_DTYPES

if TYPE_CHECKING:
    from torch import Tensor, nn

_SIZE = re.compile(r"(\d+)(?:[x×](\d+))?")


class TrainSettings(BaseModel):
    """Settings of a training step, except the model and the device.

    ``size`` is (H, W), or text as in `parse_size`. ``inputs`` are shapes as in `parse_inputs`,
    ``channels`` those of images; without either the model's ``example_inputs(batch, size)`` is
    called, or images have the channels of its first convolution. ``optimizer`` ``"auto"`` is AdamW
    in the form that PyTorch takes by default. A low ``precision`` is autocast over fp32 weights.
    ``validation_batch`` images of ``validation_size`` (``size`` by default) are run after the step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(4, ge=1)
    size: tuple[int, int] = (256, 256)
    inputs: tuple[str, ...] = ()
    channels: int | None = Field(None, ge=1)
    optimizer: Optimizer | Literal["auto"] = "auto"
    checkpointing: Checkpointing = "none"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    ema: bool = False
    accumulate: int = Field(1, ge=1)
    validation_batch: int | None = Field(None, ge=1)
    validation_size: tuple[int, int] | None = None

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
        self, model: nn.Module, on_cuda: bool, loss: Callable[[Any], Tensor] | None
    ) -> MakeStep:
        """Return a function that builds the `TrainingStep` for a batch size and (H, W)."""
        make = self._inputs()
        optimizer = self.optimizer
        if optimizer == "auto":
            optimizer = "adamw-foreach" if on_cuda else "adamw"
        validation = None
        if self.validation_batch is not None:
            size = self.validation_size or self.size
            validation = make_inputs(model, self.validation_batch, size, make)

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
