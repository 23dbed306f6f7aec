"""Settings of jobs that run video autoencoders, validated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option, Seed
from lowtide.jobs.engine.settings import validate_settings
from lowtide.jobs.video.settings import CodecName, VideoSettings

_VIDEO = "Video"
VaePrecision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class VaeSettings:
    """Settings of a job that encodes a video to latents, decodes latents, or does both.

    Attributes:
        model: Video autoencoder: a folder of diffusers or of Lowtide, or SeedVR2's .safetensors
            file.
        budget: Memory for the run on the device: 6GiB, 80% of what is free, or auto.
        device: auto, cpu, cuda:0, ...
        scratch: Folder for scratch files. Default: the system's.
        precision: auto is fp32. fp16 and bf16 take half the memory; what exceeds the range of fp16
            is computed again in fp32, or in bf16 where the budget is too small for that.
        frames: Only frames A to before B, A:B, counted from 0.
        time: Only what is shown from A to before B, A:B in seconds.
        deinterlace: Make whole frames of interlaced ones, one of each: their number, times and rate
            stay. Without it they are refused.
        max_side: Longer side of the frames, which are resized before the model. Default: as they
            are.
        sample: Draw latents from their distribution, instead of its mean.
        seed: Seed of the draw.
        fps: Frames a second of latents that do not say when their frames are shown.
        codec: Encoder of the pictures. auto: x264 for 8 bits, x265 for more, svtav1 for .webm.
        quality: Constant quality of the encoder in its own scale, where a smaller number is a
            larger file. Default: 18 of x264, 20 of x265, 28 of svtav1.
        preset: Speed of the encoder in its own words: medium, or 8 for svtav1. Slower is smaller.
        segment: Frames after which what is done, and the state that the next ones need, is kept for
            a run that goes on. What is stopped loses no more than these.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    model: Annotated[Path | None, Option(flags=("-m", "--model"))] = None
    budget: Annotated[str | int, Option(flags=("-b", "--budget"))] = "auto"
    device: str = "auto"
    scratch: Annotated[Path | None, Option()] = None
    precision: Literal["auto"] | VaePrecision = "auto"
    frames: Annotated[str | None, Option(metavar="A:B", example="24:48")] = None
    time: Annotated[str | None, Option(metavar="A:B", example="1.5:4")] = None
    deinterlace: Annotated[bool, Option(_VIDEO)] = False
    max_side: Annotated[Count | None, Option(metavar="PIXELS")] = None
    sample: bool = False
    seed: Seed = 0
    fps: Annotated[Annotated[float, Gt(0)] | None, Option(_VIDEO, example=25)] = None
    codec: Annotated[CodecName, Option(_VIDEO)] = "auto"
    quality: Annotated[float | None, Option(_VIDEO, example=18)] = None
    preset: Annotated[str | None, Option(_VIDEO, metavar="NAME", example="medium")] = None
    segment: Annotated[Count, Option(_VIDEO, metavar="FRAMES")] = 120

    # Settings that determine a result's bytes, beside model and precision.
    hashed: ClassVar[str] = (
        "frames time deinterlace max_side sample seed fps codec quality preset segment"
    )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; raises `UsageError` for invalid ones."""
        settings = validate_settings(cls, values)
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

    def video_settings(self) -> VideoSettings:
        """Return those of reading and writing video; raises `UsageError` where they disagree."""
        names = "frames time deinterlace max_side codec quality preset".split()
        return VideoSettings.of(**{name: getattr(self, name) for name in names})
