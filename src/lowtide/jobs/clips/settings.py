"""Settings of every job that reads or writes videos: which frames, and how they are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from lowtide.core.errors import UsageError
from lowtide.core.option import Count, Option
from lowtide.jobs.engine.settings import JobSettings
from lowtide.jobs.images.enlarge_settings import whole_side

if TYPE_CHECKING:
    from lowtide.media.video.encoder_settings import VideoEncoderSettings
    from lowtide.media.video.picture_format import PictureFormat

_VIDEO = "Video"
CodecName = Literal["auto", "x264", "x265", "svtav1", "prores", "ffv1"]


class ClipKeywords(TypedDict, total=False):
    """Keywords of calls on videos: the fields of `ClipSettings`."""

    frames: str | None
    time: str | None
    codec: CodecName
    quality: float | None
    preset: str | None
    segment: int
    deinterlace: bool


@dataclass(frozen=True, kw_only=True)
class ClipSettings(JobSettings):
    """Settings of frames that are read, and of videos that are made of them.

    Attributes:
        frames: Only frames A to before B, A:B, counted from 0.
        time: Only what is shown from A to before B, A:B in seconds.
        codec: Encoder of the pictures. auto: x264 for 8 bits, x265 for more, svtav1 for .webm.
        quality: Constant quality of the encoder in its own scale, where a smaller number is a
            larger file. Default: 18 of x264, 20 of x265, 28 of svtav1.
        preset: Speed of the encoder in its own words: medium, or 8 for svtav1. Slower is smaller.
        segment: Frames that are finished together. What is stopped loses no more than these.
        deinterlace: Make whole frames of interlaced ones, one of each: their number, times and rate
            stay. Without it they are refused.
    """

    frames: Annotated[str | None, Option(metavar="A:B", example="24:48")] = None
    time: Annotated[str | None, Option(metavar="A:B", example="1.5:4")] = None
    codec: Annotated[CodecName, Option(_VIDEO)] = "auto"
    quality: Annotated[float | None, Option(_VIDEO, example=18)] = None
    preset: Annotated[str | None, Option(_VIDEO, metavar="NAME", example="medium")] = None
    segment: Annotated[Count, Option(_VIDEO, metavar="FRAMES")] = 120
    deinterlace: Annotated[bool, Option(_VIDEO)] = False

    def check_frames(self) -> None:
        """Raise `UsageError` for frames that are named in two ways."""
        if self.frames is not None and self.time is not None:
            raise UsageError("--frames and --time contradict each other", hint="drop one")

    @property
    def image_rate(self) -> str | float | None:
        """Frames a second of a sequence of images, if it is told."""
        return None

    @property
    def sound_choice(self) -> str:
        """What becomes of the sound."""
        return "auto"

    @property
    def keeps_damaged(self) -> bool:
        """Whether damaged files are taken as they are."""
        return False

    @property
    def most_pixels(self) -> int:
        """Pixels of a frame that are not refused."""
        return 1_000_000_000

    @property
    def asks_for_size(self) -> bool:
        """Whether a side of the result is named."""
        return False

    def exact_size(self, width: float, height: float, model_scale: int) -> tuple[float, float]:
        """Return (W, H) of the result of frames of ``width`` and ``height``, not rounded."""
        raise NotImplementedError

    def encoder_settings(self, bits: int, target: Path) -> VideoEncoderSettings:
        """Return the encoder's settings for frames of so many bits in ``target``."""
        from lowtide.media.video.encoder_settings import VideoEncoderSettings

        codec = self.codec
        if codec == "auto":
            codec = "x264" if bits == 8 else "x265"
            if target.suffix.lower() == ".webm":
                codec = "svtav1"
        return VideoEncoderSettings(codec, self.quality, self.preset, plays=self.codec == "auto")

    def stored_size(
        self,
        format: PictureFormat,
        model_scale: int,
        rotation: int = 0,
        aspect: Fraction | None = None,
        step: tuple[int, int] = (1, 1),
    ) -> tuple[int, int, Fraction | None]:
        """Return (W, H) of result frames as stored, and the width of a pixel by its height.

        Sides that are asked for are those of the picture as players show it. The shape of pixels,
        which is ``aspect``, changes only where the width would be another: that and the height are
        multiples of ``step``.
        """
        wide = float(aspect) if self.asks_for_size and aspect else 1.0
        across, down = format.width * wide, format.height
        if rotation % 180:
            down, across = self.exact_size(down, across, model_scale)
        else:
            across, down = self.exact_size(across, down, model_scale)
        width = whole_side(across / wide, step[0])
        if wide != 1 and whole_side(width * wide) != whole_side(across):
            aspect = Fraction(whole_side(across), width)
        return width, whole_side(down, step[1]), aspect
