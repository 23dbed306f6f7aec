"""Settings of a job that upscales videos, validated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from lowtide.core.errors import UsageError
from lowtide.core.input_file import file_sha256
from lowtide.core.option import Option
from lowtide.jobs.clips.settings import ClipSettings
from lowtide.jobs.images.enlarge_settings import EnlargeSettings

_VIDEO = "Video"
# Settings of image files, which videos have no use for.
IMAGE_ONLY = (
    "strip_metadata png_compression jpeg_quality webp_quality webp_lossless avif_quality"
    " tiff_compression"
)


@dataclass(frozen=True, kw_only=True)
class VideoSettings(EnlargeSettings, ClipSettings):
    """Settings of a job that upscales videos, except its files.

    Attributes:
        model: A bundled model or a file (.safetensors, .pth, .ckpt, .onnx). Default: lowtide-x2, or
            lowtide-photo-x2 for clips that are strongly coded; -x4 for a --scale above 2.
        fps: Frames a second of a sequence of images, which has no times: 24, or 24000/1001.
        frames: Only frames A to before B, A:B, counted from 0, or by the numbers of image files.
            The sound is cut to their time.
        sound: auto copies it, and encodes what the output's container does not hold: AAC in .mp4
            and .mov, Opus in .webm, FLAC or Opus in .mkv. copy: only as it is. aac, opus or flac:
            as that codec. none: no sound. Any other text: the sound of the file of that name.
        segment: Frames that are encoded together. What is stopped loses no more than these.
        damaged: keep repeats the frame before where one cannot be decoded, and leaves out sound
            that cannot be written.
        format: mp4, mov, mkv or webm, for results in a folder; png or tif for a folder of frames.
            Default: as the input.
        streams: Tiles of a frame in flight on a GPU: while one is computed, others are copied to
            and from it. As far as the budget allows. 1: one after another.
        max_pixels: Refuse videos with frames of more pixels than this.
    """

    fps: Annotated[str | float | None, Option(metavar="RATE", example=24)] = None
    sound: Annotated[str | Path, Option(_VIDEO, metavar="auto|copy|aac|opus|flac|none|FILE")] = (
        "auto"
    )
    damaged: Annotated[Literal["refuse", "keep"], Option(_VIDEO)] = "refuse"

    hashed: ClassVar[str] = (
        "scale width height max_side denoise format precision accuracy strategy self_ensemble"
        " compile cuda_graphs provider tile tile_overlap tile_batch_size hann_blend fps frames time"
        " codec quality preset segment deinterlace sound"
    )

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        self.check_frames()
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

    @property
    def image_rate(self) -> str | float | None:
        """Frames a second of a sequence of images, if it is told."""
        return self.fps

    @property
    def sound_choice(self) -> str:
        """What becomes of the sound."""
        return str(self.sound)

    @property
    def most_pixels(self) -> int:
        """Pixels of a frame that are not refused."""
        return self.max_pixels

    @property
    def asks_for_size(self) -> bool:
        """Whether a side of the result is named."""
        return bool(self.width or self.height or self.max_side)
