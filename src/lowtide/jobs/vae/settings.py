"""Settings of jobs that run video autoencoders, validated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Required, Self, TypedDict

from annotated_types import Gt

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option, Seed
from lowtide.jobs.clips.settings import ClipKeywords, ClipSettings
from lowtide.jobs.engine.settings import JobSettings

_VIDEO = "Video"
VaePrecision = Literal["fp32", "fp16", "bf16"]


PartChoice = Literal["both", "encoder", "decoder"]
# Of frames and of a clip: with the channels of a network sizes stay below 64 bits.
_LARGEST_SIDE, _MOST_PIXELS = 1 << 14, 1 << 46
_SIZE_HINT = "--size 1280x720"


class VaeKeywords(ClipKeywords, total=False):
    """Keywords of the calls that run: the fields of `VaeSettings`."""

    model: str | Path | None
    budget: str | int
    device: str
    scratch: str | Path | None
    precision: Literal["auto"] | VaePrecision
    max_side: int | None
    sample: bool
    seed: int
    verify: bool
    fps: float | None


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

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other, or if no model is named."""
        self.check_frames()
        if self.model is None:
            raise UsageError("no model is named", hint="--model FOLDER")

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


class VaePlanKeywords(TypedDict, total=False):
    """Keywords of `plan_vae`: the fields of `VaePlanSettings`, except model and device."""

    size: Required[str | tuple[int, int]]
    frames: Required[int]
    part: PartChoice
    budget: str | int
    precision: Literal["auto"] | VaePrecision


@dataclass(frozen=True, kw_only=True)
class VaePlanSettings(JobSettings):
    """Settings of a plan of a video autoencoder; ``size`` is (width, height), or text.

    Attributes:
        model: A class, such as AutoencoderKLWan, or VideoVAE for SeedVR2's, in full size; a folder
            of diffusers or of Lowtide; or SeedVR2's .safetensors file. Weights are not needed for a
            class.
        size: Size of the frames: 1280x720.
        frames: Number of frames.
        part: Part to plan.
        device: A GPU by name, such as rtx3060-12gb, which need not be present; or cuda:0, ... of
            this machine.
        budget: Memory of the process on the GPU: 6GiB, 80%, or auto.
        precision: auto is bf16 where the GPU has it, else fp16.
    """

    model: Annotated[str | Path, Option(flags=("-m", "--model"), metavar="NAME")]
    size: Annotated[tuple[int, int], Option(metavar="WxH", example="1280x720")]
    frames: Count
    part: PartChoice = "both"
    device: Annotated[str, Option("Device")] = "cuda"
    budget: Annotated[str | int, Option("Device", flags=("-b", "--budget"))] = "auto"
    precision: Annotated[Literal["auto"] | VaePrecision, Option("Device")] = "auto"

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build settings from keywords; ``size`` may be text, ``"1280x720"``."""
        return super().of(**{**values, "size": _parse_size(values.get("size", ""))})

    def check(self) -> None:
        """Raise `UsageError` for clips that are larger than any."""
        (width, height), frames = self.size, self.frames
        if max(self.size) > _LARGEST_SIDE:
            raise UsageError(
                f"frames of {width:,}×{height:,}: sides are at most {_LARGEST_SIDE:,}",
                hint=_SIZE_HINT,
            )
        if frames * width * height > _MOST_PIXELS:
            raise UsageError(
                f"{frames:,} frames of {width:,}×{height:,} are more pixels than any disk holds",
                hint=f"{_SIZE_HINT} --frames 240",
            )


def _parse_size(size: str | tuple[int, int]) -> tuple[int, int]:
    """Return width and height."""
    sides = size.lower().split("x") if isinstance(size, str) else [str(one) for one in size]
    if len(sides) != 2 or not all(one.isdecimal() and int(one) for one in sides):
        raise UsageError(f"{size} is no size of frames", hint=_SIZE_HINT)
    return int(sides[0]), int(sides[1])
