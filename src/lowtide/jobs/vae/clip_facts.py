"""What is known of the frames that latents make: their number, size, time stamps and colors."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from lowtide.jobs.clips.task import CODEC_NAMES, VideoTask
from lowtide.media.video.encoder_settings import EncoderSettings, held_format
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.picture_format import ColorTags, PictureFormat
from lowtide.media.video.video_facts import VideoFacts

_RATIO = r"^[1-9]\d{0,11}(/[1-9]\d{0,11})?$"


class ClipFacts(BaseModel):
    """What a file of latents says of its clip.

    Attributes:
        model: Class of the autoencoder.
        scaling: What a diffusion model scales latents by; those in the file are not scaled.
        posterior: Whether latents are the mean of their distribution, or a sample of it.
        seed: Seed of the sample.
        frames: Frames of the clip; latents may make more.
        height: Rows of a frame.
        width: Columns of a frame.
        time_base: Seconds of one stamp, as ``1/12800``.
        stamps: When each frame is shown.
        last_duration: Stamps that the last frame is shown for; None if unknown.
        fps: Mean frames a second, for readers; stamps say more.
        pixel_format: FFmpeg's name of the samples.
        tags: Numbers of primaries, transfer and matrix, and whether the range is full.
        chroma_location: FFmpeg's number.
        rotation: Degrees by which players turn frames, counterclockwise.
        mirrored: Whether players mirror them.
        pixel_aspect: Width of a pixel by its height, as ``4/3``; None if unknown.
    """

    model: str
    scaling: dict[str, Any] = {}
    posterior: str = "mean"
    seed: int | None = None
    frames: int = Field(ge=1)
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    time_base: str = Field(pattern=_RATIO)
    stamps: list[int]
    last_duration: int | None = None
    fps: float | None = None
    pixel_format: str = "yuv420p"
    tags: tuple[int, int, int, bool | None] = (1, 1, 1, False)
    chroma_location: int = 0
    rotation: int = 0
    mirrored: bool = False
    pixel_aspect: str | None = Field(default=None, pattern=_RATIO)

    @property
    def picture(self) -> PictureFormat:
        """Format of the frames; raises `VideoError` for one that cannot be converted."""
        tags = ColorTags(*self.tags)
        return PictureFormat(self.width, self.height, self.pixel_format, tags, self.chroma_location)


def facts_of_clip(task: VideoTask, **values: object) -> ClipFacts:
    """Return what a file of latents says of the frames of a video; ``values`` are the rest."""
    facts, stored = task.facts, task.stored
    tags = facts.format.resized(stored.width, stored.height).tags
    return ClipFacts.model_validate(
        {
            "frames": task.frames,
            "height": stored.height,
            "width": stored.width,
            "time_base": str(facts.time_base),
            "stamps": [int(one) for one in task.stamps],
            "last_duration": task.last_duration,
            "fps": None if task.frame_rate is None else float(task.frame_rate),
            "pixel_format": facts.format.name,
            "tags": (tags.primaries, tags.transfer, tags.matrix, tags.full_range),
            "chroma_location": facts.format.chroma_location,
            "rotation": facts.rotation,
            "mirrored": facts.mirrored,
            "pixel_aspect": None if task.pixel_aspect is None else str(task.pixel_aspect),
            **values,
        }
    )


def task_of_latents(
    source: Path, target: Path, facts: ClipFacts, encoder: EncoderSettings
) -> VideoTask:
    """Return how frames become a video of their own, by what their latents say.

    Raises:
        UsageError: The encoder or the container cannot hold them.
        VideoError: The file names a picture of an unknown kind.
    """
    video = VideoFacts(
        path=source,
        format=facts.picture,
        stamps=np.array(facts.stamps, np.int64),
        time_base=Fraction(facts.time_base),
        last_duration=facts.last_duration or 0,
        container="",
        codec="",
        stream=0,
        rotation=facts.rotation,
        mirrored=facts.mirrored,
        pixel_aspect=None if facts.pixel_aspect is None else Fraction(facts.pixel_aspect),
        light=None,
        ordered=True,
        damage=None,
        notes=(),
    )
    stored, notes = held_format(encoder, video.format)
    streams = plan_streams(None, target, codec=CODEC_NAMES[encoder.codec])
    aspect = video.pixel_aspect
    return VideoTask(video, 0, facts.frames, stored, encoder, streams, tuple(notes), aspect)


def default_clip_facts(frames: int, height: int, width: int, fps: float) -> ClipFacts:
    """Return facts of latents that say nothing of their clip: 8 bits, of BT.709."""
    length = Fraction(1 / fps).limit_denominator(100_000)
    return ClipFacts(
        model="",
        frames=frames,
        height=height,
        width=width,
        time_base=str(Fraction(1, length.denominator)),
        stamps=[number * length.numerator for number in range(frames)],
        last_duration=length.numerator,
        fps=fps,
    )
