"""Latents of clips in .safetensors files, and what these say of the clip to make it again."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from lowtide.core.atomic_file import atomic_output, sync_to_disk
from lowtide.core.errors import InputError
from lowtide.core.input_file import require_input
from lowtide.jobs.clips.result import ComputedFrame, FileWriter
from lowtide.jobs.clips.task import CODEC_NAMES, VideoTask
from lowtide.jobs.clips.work import SegmentsFolder, VideoSegment
from lowtide.media.video.encoder_settings import VideoEncoderSettings, held_format
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.picture_format import ColorTags, PictureFormat
from lowtide.media.video.video_facts import VideoFacts
from lowtide.models.lowtide_files import read_metadata, read_tensors
from lowtide.models.video_vae.video_vae import latents_of

if TYPE_CHECKING:
    from torch import Tensor

KEY, _ENTRY = "latents", "lowtide.clip"
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
    source: Path, target: Path, facts: ClipFacts, encoder: VideoEncoderSettings
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


def read_latents(path: Path) -> tuple[Tensor, ClipFacts | None]:
    """Read latents (1, C, n, h, w) and what the file says of them, if it was written here.

    Raises:
        InputError: There are none, of more than one clip, or with values that are not finite.
        ModelError: It is no .safetensors file.
    """
    import torch

    require_input(path)
    entries = read_metadata(path)
    names, found = _stored_latents(path)
    if found is None:
        raise InputError(
            f"{path} holds no tensor {KEY!r}, only {', '.join(names[:3]) or 'nothing'}"
        )
    latents = found
    if latents.dim() == 4:
        latents = latents.unsqueeze(0)
    shape = "×".join(map(str, latents.shape))
    if latents.dim() != 5 or 0 in latents.shape or not latents.is_floating_point():
        raise InputError(
            f"{path}: latents are (1, channels, number, height, width) of floating point, not"
            f" {latents.dtype} {shape}"
        )
    if len(latents) != 1:
        raise InputError(
            f"{path} holds the latents of {len(latents)} clips ({shape}), and a video is one",
            hint="save each clip in a file of its own",
        )
    if not torch.isfinite(latents).all():
        raise InputError(f"{path}: latents are not finite (NaN or infinity)")
    return latents.float(), _facts(path, entries)


def _stored_latents(path: Path) -> tuple[list[str], Tensor | None]:
    """Return the names of a file's tensors, and its latents."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return names, file.get_tensor(KEY) if KEY in names else None
    except SafetensorError:  # metadata that are not all text
        tensors = read_tensors(path)
        return list(tensors), tensors.get(KEY)


def _facts(path: Path, entries: dict[str, str]) -> ClipFacts | None:
    if (text := entries.get(_ENTRY)) is None:
        return None
    try:
        facts = ClipFacts.model_validate_json(text)
    except ValidationError as error:
        one = error.errors()[0]
        where = ".".join(map(str, one["loc"]))
        raise InputError(
            f"{path}: what it says of its clip is wrong: {where}: {one['msg']}"
        ) from error
    if len(facts.stamps) != facts.frames or any(
        later <= earlier for earlier, later in zip(facts.stamps, facts.stamps[1:], strict=False)
    ):
        raise InputError(f"{path}: its {len(facts.stamps)} stamps are not those of its frames")
    return facts


class LatentWriter(FileWriter):
    """Writes latents as they are encoded, and makes their file of them.

    A frame is mean and log variance of one latent, float32 (2 C, h, w); a segment is these of its
    latents, one after the other.

    Args:
        target: The output.
        task: How the video is read.
        work: The folder of the segments.
        segments: All of them.
        shape: Channels, number, height and width of the latents.
        seed: Seed of a draw from their distribution; None for the mean.
        facts: What the file says of its clip.
        replace: Whether a file that is at ``target`` in the end is replaced.
    """

    def __init__(
        self,
        target: Path,
        task: VideoTask,
        work: SegmentsFolder,
        segments: list[VideoSegment],
        shape: tuple[int, int, int, int],
        seed: int | None,
        facts: ClipFacts,
        *,
        replace: bool,
    ) -> None:
        super().__init__(
            target, task, work, segments, part="unfinished", joined=target.name, replace=replace
        )
        self._shape, self._seed, self._facts = shape, seed, facts
        self._file: BinaryIO | None = None

    def write(self, frame: ComputedFrame) -> None:
        """Write the mean and log variance of the next latent."""
        if self._file is None:
            self._file = self._part.open("wb")
        for values in frame.planes:
            self._file.write(np.ascontiguousarray(values).data)

    def end_segment(self, segment: VideoSegment) -> Path:
        """Close the file of a segment."""
        assert self._file is not None
        self._file.close()
        self._file = None
        sync_to_disk(self._part)
        return self._part

    def latents(self) -> Tensor:
        """Return the latents of all segments, (1, C, n, h, w)."""
        import torch

        channels, number, height, width = self._shape
        moments = torch.empty(number, 2 * channels, height, width)
        for one in self.segments:
            with one.path.open("rb") as file:
                file.readinto(moments[one.first : one.last].flatten().numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
        sample = self._seed is not None
        return latents_of(moments.transpose(0, 1)[None], sample=sample, seed=self._seed or 0)

    def join(self) -> list[str]:
        """Write the file of latents."""
        from safetensors.torch import save_file

        entries = {_ENTRY: self._facts.model_dump_json()}
        with atomic_output(self._joined) as part:
            save_file({KEY: self.latents().contiguous()}, part, entries)
        return []

    def abort(self) -> None:
        """Remove what is not finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of what is still buffered
                self._file.close()
        super().abort()
