"""Settings of jobs that run video autoencoders, validated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option, Seed
from lowtide.jobs.clips.settings import ClipSettings
from lowtide.jobs.engine.settings import validate_settings

_VIDEO = "Video"
VaePrecision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class VaeSettings(ClipSettings):
    """Settings of a job that encodes a video to latents, decodes latents, or does both.

    Attributes:
        model: Video autoencoder: a folder of diffusers or of Lowtide, or SeedVR2's .safetensors
            file.
        budget: Memory for the run on the device: 6GiB, 80% of what is free, or auto.
        device: auto, cpu, cuda:0, ...
        scratch: Folder for scratch files. Default: the system's.
        precision: auto is fp32. fp16 and bf16 take half the memory; what exceeds the range of fp16
            is computed again in fp32, or in bf16 where the budget is too small for that.
        max_side: Longer side of the frames, which are resized before the model. Default: as they
            are.
        sample: Draw latents from their distribution, instead of its mean.
        seed: Seed of the draw.
        verify: Compare what is made of the first frames with the model's own call, of as many as
            the budget leaves room for.
        fps: Frames a second of latents that do not say when their frames are shown.
        segment: Frames after which what is done, and the state that the next ones need, is kept for
            a run that goes on. What is stopped loses no more than these.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    model: Annotated[Path | None, Option(flags=("-m", "--model"))] = None
    budget: Annotated[str | int, Option(flags=("-b", "--budget"))] = "auto"
    device: str = "auto"
    scratch: Annotated[Path | None, Option()] = None
    precision: Literal["auto"] | VaePrecision = "auto"
    max_side: Annotated[Count | None, Option(metavar="PIXELS")] = None
    sample: bool = False
    seed: Seed = 0
    verify: bool = False
    fps: Annotated[Annotated[float, Gt(0)] | None, Option(_VIDEO, example=25)] = None

    # Settings that determine a result's bytes, beside model and precision.
    hashed: ClassVar[str] = (
        "frames time deinterlace max_side sample seed fps codec quality preset segment"
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; raises `UsageError` for invalid ones."""
        settings = validate_settings(cls, values)
        settings.check_frames()
        if settings.model is None:
            raise UsageError("no model is named", hint="--model FOLDER")
        return settings

    @property
    def resolved_precision(self) -> VaePrecision:
        """The precision to compute in."""
        return "fp32" if self.precision == "auto" else self.precision

    @property
    def hashed_values(self) -> dict[str, Any]:
        """What of the settings determines a result's bytes, by name."""
        return {name: getattr(self, name) for name in self.hashed.split()}

    @property
    def asks_for_size(self) -> bool:
        """Whether a side of the frames is named."""
        return self.max_side is not None

    def exact_size(self, width: float, height: float, model_scale: int) -> tuple[float, float]:
        """Return (W, H) of the frames that the model gets, not rounded."""
        factor = model_scale if self.max_side is None else self.max_side / max(width, height)
        return width * factor, height * factor
