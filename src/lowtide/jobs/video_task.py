"""What is decided about a video before it runs: its frames, its encoder and its streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.jobs.target_size import TargetSize
from lowtide.jobs.video_memory import reading_bytes, writing_bytes
from lowtide.jobs.video_rows import frame_info
from lowtide.jobs.video_settings import VideoSettings
from lowtide.jobs.video_work import VideoSegment, segments_of
from lowtide.media import ImageFacts, OutputCost
from lowtide.media.image_info import ImageInfo
from lowtide.media.video.encoder_settings import EncoderSettings, held_format
from lowtide.media.video.frame_range import frame_range
from lowtide.media.video.other_streams import StreamPlan, plan_streams
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.video_facts import VideoFacts, inspect_video
from lowtide.media.video.video_segments import segment_suffix

CODEC_NAMES = {
    "x264": "h264",
    "x265": "hevc",
    "svtav1": "av1",
    "prores": "prores",
    "ffv1": "ffv1",
}


@dataclass(frozen=True, eq=False)
class VideoTask:
    """One video: frames ``first`` to before ``last`` of a file, and how they are stored."""

    facts: VideoFacts
    first: int
    last: int
    stored: PictureFormat
    encoder: EncoderSettings
    streams: StreamPlan
    notes: tuple[str, ...]

    @property
    def encoder_text(self) -> str:
        """The encoder and what is set of it."""
        chosen = self.encoder
        parts = (f"quality {chosen.quality:g}" if chosen.quality is not None else "", chosen.preset)
        return ", ".join(filter(None, (chosen.codec, *parts)))

    @property
    def frames(self) -> int:
        """Number of frames."""
        return self.last - self.first

    @property
    def is_cut(self) -> bool:
        """Whether it is a part of the file."""
        return self.frames < self.facts.frames

    @property
    def stamps(self) -> np.ndarray:
        """When each frame is shown."""
        return self.facts.stamps[self.first : self.last]

    @property
    def last_duration(self) -> int | None:
        """How long the last frame is shown, in units of the time base; None if unknown."""
        facts = self.facts
        if self.last < facts.frames:
            return int(facts.stamps[self.last] - facts.stamps[self.last - 1])
        return facts.last_duration or None

    @property
    def seconds(self) -> float:
        """Time from the first frame to the end of the last one."""
        length = int(self.stamps[-1] - self.stamps[0]) + (self.last_duration or 0)
        return float(length * self.facts.time_base)

    @property
    def frame_rate(self) -> Fraction | None:
        """Mean frames a second; None of a single frame."""
        if self.frames == 1:
            return None
        length = int(self.stamps[-1] - self.stamps[0]) * self.facts.time_base
        return ((self.frames - 1) / length).limit_denominator(1001)

    def segments(self, target: Path, step: int) -> list[VideoSegment]:
        """Return the segments of ``step`` frames of an output."""
        return segments_of(target, self.first, self.last, step, segment_suffix(self.encoder.codec))

    def sizes(self, scale: int) -> TargetSize:
        """Return the sizes of a frame and of its result, and the memory of reading and writing."""
        facts = replace(frame_facts(self.facts), notes=self.notes)
        info, output = facts.info, frame_info(self.stored)
        made = ImageInfo(info.width * scale, info.height * scale, 3, "float32")
        resized = made != output
        taken, usual = writing_bytes(self.stored, self.encoder)
        if resized:
            taken, usual = (one + made.height * made.row_bytes for one in (taken, usual))
        writing = OutputCost(taken, usual, "the encoder looks ahead")
        size = (output.width, output.height) if resized else None
        return TargetSize(facts, made, output, self.streams.container, writing, size)


def frame_facts(video: VideoFacts) -> ImageFacts:
    """Return what a frame of a video is for the network, and the memory of reading it."""
    taken, usual = reading_bytes(video.format)
    return ImageFacts(
        info=frame_info(video.format),
        format=video.codec,
        orientation=1,
        resident_bytes=taken,
        typical_bytes=usual,
        scratch_bytes=0,
        reason="a few frames are decoded ahead",
        notes=tuple(video.notes),
    )


def video_task(source: Path, target: Path, settings: VideoSettings, scale: int) -> VideoTask:
    """Return what a file becomes with a model of this ``scale``.

    Raises:
        VideoError: The file cannot be used.
        UsageError: The settings do not suit it, or the output cannot hold it.
    """
    facts = inspect_video(source, keep_damaged=settings.keeps_damaged)
    info = frame_info(facts.format)
    if info.pixels > settings.max_pixels:
        raise VideoError(
            f"{source}: frames of {info.width} × {info.height} are {info.pixels:,} pixels, and the"
            f" limit is {settings.max_pixels:,}",
            hint=f"--max-pixels {info.pixels} if this size is intended",
        )
    first, last = frame_range(facts, settings.frames, settings.time)
    encoder = settings.encoder_settings(facts.format.bits, target)
    size = settings.shown_size(info, scale, facts.rotation)
    stored, notes = held_format(encoder, facts.format.resized(*size), facts.light)
    cut = last - first < facts.frames
    streams = plan_streams(source, target, codec=CODEC_NAMES[encoder.codec], cut=cut)
    notes = (*facts.notes, *notes, *streams.notes)
    return VideoTask(facts, first, last, stored, encoder, streams, notes)
