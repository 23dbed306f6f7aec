"""What is decided about a video before it runs: its frames, its encoder and its streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError, VideoError
from lowtide.core.input_file import exists, file_sha256
from lowtide.jobs.clips.memory import (
    image_reading_bytes,
    image_writing_bytes,
    reading_bytes,
    writing_bytes,
)
from lowtide.jobs.clips.rows import frame_info
from lowtide.jobs.clips.settings import ClipSettings
from lowtide.jobs.clips.work import SEQUENCE_SUFFIX, VideoSegment, segments_of
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media import EncodingMemory, ImageFacts
from lowtide.media.formats import output_format
from lowtide.media.image_info import ImageInfo
from lowtide.media.video.checks_before_work import require_one_format, tried_streams
from lowtide.media.video.encoder_settings import (
    VideoEncoderSettings,
    held_format,
    side_step,
)
from lowtide.media.video.frame_pattern import FramePattern
from lowtide.media.video.frame_sequence import (
    FrameSequenceFacts,
    inspect_sequence,
    pixel_format_for_images,
    sequence_part,
)
from lowtide.media.video.other_streams import OutputStreamsPlan, no_streams, plan_streams
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.video_encoder import segment_suffix
from lowtide.media.video.video_facts import VideoFacts, frame_range, inspect_video
from lowtide.media.video.video_reader import HELD_FRAMES, require_opaque, video_part

CODEC_NAMES = {
    "x264": "h264",
    "x265": "hevc",
    "svtav1": "av1",
    "prores": "prores",
    "ffv1": "ffv1",
}


@dataclass(frozen=True, eq=False)
class VideoTask:
    """One video: frames ``first`` to before ``last`` of a file, and how they are stored.

    ``pixel_aspect`` is the width of a stored pixel by its height, or None if unknown.
    """

    facts: VideoFacts
    first: int
    last: int
    stored: PictureFormat
    encoder: VideoEncoderSettings | None  # None of image files
    streams: OutputStreamsPlan
    notes: tuple[str, ...]
    pixel_aspect: Fraction | None = None

    @property
    def encoder_text(self) -> str:
        """The encoder and what is set of it."""
        chosen = self.encoder
        if chosen is None:
            return self.streams.container
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
        """Time from the first frame to the end of the last one; 0 if frames have no times."""
        if isinstance(self.facts, FrameSequenceFacts) and not self.facts.has_times:
            return 0.0
        length = int(self.stamps[-1] - self.stamps[0]) + (self.last_duration or 0)
        return float(length * self.facts.time_base)

    @property
    def frame_rate(self) -> Fraction | None:
        """Mean frames a second; None of a single frame."""
        if self.frames == 1:
            return None
        length = int(self.stamps[-1] - self.stamps[0]) * self.facts.time_base
        return ((self.frames - 1) / length).limit_denominator(1001)

    @property
    def content_sha256(self) -> str:
        """Hash of the input's content."""
        if isinstance(self.facts, FrameSequenceFacts):
            return self.facts.content_sha256(self.first, self.last)
        return file_sha256(self.facts.path)

    def number(self, index: int) -> int:
        """Return the number of a frame in names of image files: its file's, or its place."""
        facts = self.facts
        return facts.files[index].number if isinstance(facts, FrameSequenceFacts) else index

    def segments(self, target: Path, step: int) -> list[VideoSegment]:
        """Return the segments of ``step`` frames of an output."""
        suffix = SEQUENCE_SUFFIX if self.encoder is None else segment_suffix(self.encoder.codec)
        return segments_of(target, self.first, self.last, step, suffix)

    @property
    def writing_bytes(self) -> tuple[int, int]:
        """Upper bound and usual bytes of writing."""
        if self.encoder is None:
            return image_writing_bytes(self.stored, self.streams.container)
        return writing_bytes(self.stored, self.encoder)

    def sizes(self, scale: int) -> TargetSize:
        """Return the sizes of a frame and of its result, and the memory of reading and writing."""
        facts = replace(frame_facts(self.facts), notes=self.notes)
        info, output = facts.info, frame_info(self.stored)
        made = ImageInfo(info.width * scale, info.height * scale, 3, "float32")
        resized = made != output
        taken, usual = self.writing_bytes
        if resized:
            taken, usual = (one + made.height * made.row_bytes for one in (taken, usual))
        reason = "the encoder looks ahead" if self.encoder else "a few frames wait to be written"
        writing = EncodingMemory(taken, usual, reason)
        size = (output.width, output.height) if resized else None
        return TargetSize(
            facts, made, output, self.streams.container, writing, size, codecs_stay=True
        )


def frame_facts(video: VideoFacts) -> ImageFacts:
    """Return what a frame of a video is for the network, and the memory of reading it."""
    if isinstance(video, FrameSequenceFacts):
        taken, usual = image_reading_bytes(video.format, video.decoding)
    else:
        taken, usual = reading_bytes(video.decoded, HELD_FRAMES if video.deinterlaces else 0)
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


def video_input_facts(source: Path, settings: ClipSettings) -> VideoFacts:
    """Return the facts of a video file, or of a sequence by its pattern.

    Raises:
        VideoError: It cannot be used.
        UsageError: Settings are for the other kind.
    """
    pattern = None if exists(source) else FramePattern.parse(source)
    if pattern is None:
        if settings.image_rate is not None:
            raise UsageError(
                f"--fps is for sequences of images, and {source} has time stamps", hint="drop it"
            )
        return inspect_video(
            source, keep_damaged=settings.keeps_damaged, deinterlace=settings.deinterlace
        )
    if settings.deinterlace:
        raise UsageError(
            f"--deinterlace is for video files, and {source} is images", hint="drop it"
        )
    if settings.time is not None and settings.image_rate is None:
        raise UsageError("--time asks for times, which image files have not", hint="add --fps 24")
    return inspect_sequence(pattern, settings.image_rate)


def video_task(source: Path, target: Path, settings: ClipSettings, scale: int) -> VideoTask:
    """Return what a file, or a sequence of images, becomes with a model of this ``scale``.

    Raises:
        VideoError: The input cannot be used.
        UsageError: The settings do not suit it, or the output cannot hold it.
    """
    facts = video_input_facts(source, settings)
    first, last = frame_range(facts, settings.frames, settings.time)
    if isinstance(facts, FrameSequenceFacts):
        facts = sequence_part(facts, first, last, keep_damaged=settings.keeps_damaged)
    else:
        facts = video_part(facts, first, keep_damaged=settings.keeps_damaged)
        require_one_format(facts, first, last, settings.keeps_damaged)
        require_opaque(facts, first, last, keep_damaged=settings.keeps_damaged)
    info = frame_info(facts.format)
    if info.pixels > settings.most_pixels:
        raise VideoError(
            f"{source}: frames of {info.width} × {info.height} are {info.pixels:,} pixels, and the"
            f" limit is {settings.most_pixels:,}",
            hint=f"--max-pixels {info.pixels} if this size is intended",
        )
    if FramePattern.parse(target) is not None:
        width, height, _ = settings.stored_size(facts.format, scale, facts.rotation)
        made = facts.format.resized(width, height)
        return _image_task(facts, first, last, made, target, settings)
    if isinstance(facts, FrameSequenceFacts) and not facts.has_times:
        raise UsageError(
            f"{target}: a video says when frames are shown, and image files do not",
            hint="add --fps 24, or as many frames a second as they are",
        )
    encoder = settings.encoder_settings(facts.format.bits, target)
    stored, aspect, notes = _stored(facts, settings, encoder, scale)
    streams = plan_streams(
        None if isinstance(facts, FrameSequenceFacts) else source,
        target,
        codec=CODEC_NAMES[encoder.codec],
        cut=last - first < facts.frames,
        sound=settings.sound_choice,
    )
    streams = tried_streams(streams, keep_damaged=settings.keeps_damaged)
    if isinstance(facts, FrameSequenceFacts) and facts.icc is not None:
        notes.append("the color profile of the images is not kept: videos have none")
    return VideoTask(
        facts,
        first,
        last,
        stored,
        encoder,
        streams,
        (*facts.notes, *notes, *streams.notes),
        aspect,
    )


def _stored(
    facts: VideoFacts, settings: ClipSettings, encoder: VideoEncoderSettings, scale: int
) -> tuple[PictureFormat, Fraction | None, list[str]]:
    """Return how results are stored, the shape of their pixels, and sentences on what differs."""
    format, shape = facts.format, (facts.rotation, facts.pixel_aspect)
    *exact, _ = settings.stored_size(format, scale, *shape)
    step = side_step(encoder, format)
    width, height, aspect = settings.stored_size(format, scale, *shape, step)
    stored, notes = held_format(encoder, format.resized(width, height), facts.light)
    if [width, height] != exact:
        odd = f"{exact[0]}×{exact[1]}"
        notes.append(
            f"{encoder.codec} holds no odd sizes of {stored.name}: {width}×{height}, not {odd}"
        )
    return stored, aspect, notes


def _image_task(
    facts: VideoFacts,
    first: int,
    last: int,
    made: PictureFormat,
    target: Path,
    settings: ClipSettings,
) -> VideoTask:
    """Return what frames of a format become as image files."""
    given = settings.codec, settings.quality, settings.preset, settings.sound_choice
    if given != ("auto", None, None, "auto"):
        raise UsageError(
            f"{target}: --codec, --quality, --preset and --sound are for videos", hint="drop them"
        )
    stored, notes = pixel_format_for_images(facts, made)
    source = None if isinstance(facts, FrameSequenceFacts) else facts.path
    streams = no_streams(source, output_format(target).name)
    return VideoTask(facts, first, last, stored, None, streams, (*facts.notes, *notes))
