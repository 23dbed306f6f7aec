"""Settings of a job that upscales videos, validated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from lowtide.core.errors import UsageError
from lowtide.core.hashing import file_sha256
from lowtide.core.option import Count, Option
from lowtide.jobs.upscale.settings import UpscaleSettings, whole_side

if TYPE_CHECKING:
    from lowtide.media.video.encoder_settings import EncoderSettings
    from lowtide.media.video.picture_format import PictureFormat

_VIDEO = "Video"
CodecName = Literal["auto", "x264", "x265", "svtav1", "prores", "ffv1"]
# Settings of image files, which videos have no use for.
IMAGE_ONLY = (
    "strip_metadata png_compression jpeg_quality webp_quality webp_lossless avif_quality"
    " tiff_compression"
)


@dataclass(frozen=True, kw_only=True)
class VideoSettings(UpscaleSettings):
    """Settings of a job that upscales videos, except its files.

    Attributes:
        model: A bundled model or a file (.safetensors, .pth, .ckpt, .onnx). Default: lowtide-x2, or
            lowtide-photo-x2 for clips that are strongly coded; -x4 for a --scale above 2.
        fps: Frames a second of a sequence of images, which has no times: 24, or 24000/1001.
        frames: Only frames A to before B, A:B, counted from 0, or by the numbers of image files.
            The sound is cut to their time.
        time: Only what is shown from A to before B, A:B in seconds.
        codec: Encoder of the pictures. auto: x264 for 8 bits, x265 for more,
            svtav1 for .webm.
        quality: Constant quality of the encoder in its own scale, where a smaller number is a
            larger file. Default: 18 of x264, 20 of x265, 28 of svtav1.
        preset: Speed of the encoder in its own words: medium, or 8 for svtav1. Slower is smaller.
        sound: auto copies it, and encodes what the output's container does not hold: AAC in .mp4
            and .mov, Opus in .webm, FLAC or Opus in .mkv. copy: only as it is. aac, opus or flac:
            as that codec. none: no sound. Any other text: the sound of the file of that name.
        segment: Frames that are encoded together. What is stopped loses no more than these.
        damaged: keep repeats the frame before where one cannot be decoded, and leaves out sound
            that cannot be written.
        deinterlace: Make whole frames of interlaced ones, one of each: their number, times and rate
            stay. Without it they are refused.
        format: mp4, mov, mkv or webm, for results in a folder; png or tif for a folder of frames.
            Default: as the input.
        streams: Tiles of a frame in flight on a GPU: while one is computed, others are copied to
            and from it. As far as the budget allows. 1: one after another.
        max_pixels: Refuse videos with frames of more pixels than this.
    """

    fps: Annotated[str | float | None, Option(metavar="RATE", example=24)] = None
    frames: Annotated[str | None, Option(metavar="A:B", example="24:48")] = None
    time: Annotated[str | None, Option(metavar="A:B", example="1.5:4")] = None
    codec: Annotated[CodecName, Option(_VIDEO)] = "auto"
    quality: Annotated[float | None, Option(_VIDEO, example=18)] = None
    preset: Annotated[str | None, Option(_VIDEO, metavar="NAME", example="medium")] = None
    sound: Annotated[str | Path, Option(_VIDEO, metavar="auto|copy|aac|opus|flac|none|FILE")] = (
        "auto"
    )
    segment: Annotated[Count, Option(_VIDEO, metavar="FRAMES")] = 120
    damaged: Annotated[Literal["refuse", "keep"], Option(_VIDEO)] = "refuse"
    deinterlace: Annotated[bool, Option(_VIDEO)] = False

    hashed: ClassVar[str] = (
        "scale width height max_side denoise format precision accuracy strategy self_ensemble"
        " compile cuda_graphs provider tile tile_overlap tile_batch_size hann_blend fps frames time"
        " codec quality preset segment deinterlace sound"
    )

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        if self.frames is not None and self.time is not None:
            raise UsageError("--frames and --time contradict each other", hint="drop one")
        usual = {one.name: one.default for one in fields(self)}
        for name in IMAGE_ONLY.split():
            if getattr(self, name) != usual[name]:
                raise UsageError(f"{name} is for image files, not for videos", hint="drop it")

    def _hashed_values(self) -> dict[str, Any]:
        values, sound = super()._hashed_values(), Path(self.sound)
        if "sound" in values:
            content = file_sha256(sound) if sound.is_file() else ""
            values["sound"] = f"{sound} {content}".rstrip()
        return values

    @property
    def keeps_damaged(self) -> bool:
        """Whether damaged files are taken as they are."""
        return self.damaged == "keep"

    def encoder_settings(self, bits: int, target: Path) -> EncoderSettings:
        """Return the encoder's settings for frames of so many bits in ``target``."""
        from lowtide.media.video.encoder_settings import EncoderSettings

        codec = self.codec
        if codec == "auto":
            codec = "x264" if bits == 8 else "x265"
            if target.suffix.lower() == ".webm":
                codec = "svtav1"
        return EncoderSettings(codec, self.quality, self.preset, plays=self.codec == "auto")

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
        sized = self.width or self.height or self.max_side
        wide = float(aspect) if sized and aspect else 1.0
        across, down = format.width * wide, format.height
        if rotation % 180:
            down, across = self.exact_size(down, across, model_scale)
        else:
            across, down = self.exact_size(across, down, model_scale)
        width = whole_side(across / wide, step[0])
        if wide != 1 and whole_side(width * wide) != whole_side(across):
            aspect = Fraction(whole_side(across), width)
        return width, whole_side(down, step[1]), aspect
