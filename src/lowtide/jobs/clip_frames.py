"""Frames of a video as one tensor, and a video made of such a tensor."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import NotFiniteError
from lowtide.core.metrics import SSIM_WINDOW, psnr, ssim
from lowtide.core.progress import Cancel
from lowtide.jobs.latent_files import ClipFacts
from lowtide.jobs.video_result import MadeFrame, VideoResult
from lowtide.jobs.video_rows import FrameSink, FrameSource, frame_info
from lowtide.jobs.video_task import CODEC_NAMES, VideoTask
from lowtide.jobs.video_work import VideoWork
from lowtide.media.video.encoder_settings import EncoderSettings, held_format
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.video_facts import VideoFacts
from lowtide.media.video.video_reader import VideoReader

if TYPE_CHECKING:
    from torch import Tensor

AfterFrame = Callable[[], object]


def read_clip(task: VideoTask, after_frame: AfterFrame) -> Tensor:
    """Return the frames of a video, resized to those of its result: (1, 3, T, H, W) in -1..1.

    Raises:
        VideoError: A frame cannot be decoded.
    """
    import torch

    stored, format = task.stored, task.facts.format
    clip = torch.empty(1, 3, task.frames, stored.height, stored.width)
    for frame in VideoReader(task.facts, task.first, task.last):
        rows = FrameSource(frame.planes, format).read(0, format.height)
        rows = _resized(rows, stored.width, stored.height)
        target = clip[0, :, frame.index - task.first]
        torch.sub(torch.from_numpy(rows).permute(2, 0, 1) * 2, 1, out=target)
        after_frame()
    return clip


def write_clip(
    frames: Tensor,
    task: VideoTask,
    target: Path,
    *,
    after_frame: AfterFrame,
    cancel: Cancel = None,
) -> list[str]:
    """Write frames (1, 3, T, H, W) as a video with the other streams of the task.

    Values are in -1..1; those beyond are clipped. Returns notes on what could not be kept.

    Raises:
        NotFiniteError: A frame has NaN or infinity.
        OutputError: The file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    (segment,) = task.segments(target, task.frames)
    work = VideoWork(target, str(uuid.uuid4()))  # nothing of another run is used
    result = VideoResult(target, task, work, [segment], cancel, lambda: None)
    try:
        for number in range(task.frames):
            sink = FrameSink(frame_info(task.stored), task.stored)
            sink.write(0, image_of(frames, number))
            result.write_frame(MadeFrame(segment, task.first + number, sink.planes))
            after_frame()
        result.commit()
    except BaseException:
        result.abort()
        raise
    return result.notes


def image_of(frames: Tensor, number: int) -> np.ndarray:
    """Return frame ``number`` of (1, 3, T, H, W) in -1..1 as float32 (H, W, 3) in 0..1.

    Raises `NotFiniteError` where it has NaN or infinity.
    """
    import torch

    image = frames[0, :, number].float()
    if not torch.isfinite(image).all():
        raise NotFiniteError(
            f"frame {number:,} that the model made has values that are not finite",
            hint="the weights or the latents may be damaged",
        )
    return image.permute(1, 2, 0).add(1).div(2).clamp(0, 1).cpu().numpy()


def compare_clips(made: Tensor, given: Tensor) -> dict[str, float | None]:
    """Return PSNR and SSIM of frames (1, 3, T, H, W) in -1..1 against others, in 0..1.

    SSIM is None of frames that are smaller than its window.
    """
    errors, likeness = [], []
    for number in range(made.shape[2]):
        one, other = image_of(made, number), image_of(given, number)
        errors.append(10 ** (-psnr(one, other) / 10))
        if min(one.shape[:2]) >= SSIM_WINDOW:
            likeness.append(ssim(one, other))
    return {
        "psnr_db": _decibels(float(np.mean(errors))),
        "worst_psnr_db": _decibels(max(errors)),
        "ssim": round(float(np.mean(likeness)), 4) if likeness else None,
    }


def clip_facts(task: VideoTask, **values: object) -> ClipFacts:
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
            "pixel_aspect": None if facts.pixel_aspect is None else str(facts.pixel_aspect),
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
    return VideoTask(video, 0, facts.frames, stored, encoder, streams, tuple(notes))


def default_facts(frames: int, height: int, width: int, fps: float) -> ClipFacts:
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


def _resized(rows: np.ndarray, width: int, height: int) -> np.ndarray:
    if rows.shape[:2] == (height, width):
        return rows
    import pyvips

    from lowtide.media.pixels import resize

    image = resize(pyvips.Image.new_from_array(np.ascontiguousarray(rows)), width, height)
    return np.asarray(image.numpy(), np.float32)


def _decibels(error: float) -> float | None:
    return None if error == 0 else round(-10 * float(np.log10(error)), 2)
