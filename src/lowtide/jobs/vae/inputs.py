"""Files that go into a video autoencoder, and what comes out, before anything runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.atomic_file import (
    require_distinct,
    require_name,
    require_output,
    require_replaceable,
)
from lowtide.core.errors import InputError, UsageError
from lowtide.core.input_file import exists, file_sha256, is_folder
from lowtide.integrations.clip_autoencoder import ClipAutoencoder
from lowtide.jobs.clips.task import VideoTask, video_task
from lowtide.jobs.vae.latents import ClipFacts, default_clip_facts, read_latents, task_of_latents
from lowtide.jobs.vae.report import Operation
from lowtide.jobs.vae.settings import VaeSettings
from lowtide.media.video.frame_pattern import FramePattern

if TYPE_CHECKING:
    from torch import Tensor

_USUAL_FPS = 25.0
# A video that is never written, where only how frames are read is asked for.
_UNWRITTEN = Path("frames.mkv")


def require_videos(*paths: Path | None) -> None:
    """Raise `UsageError` for names of sequences of images."""
    for path in paths:
        if path is not None and not exists(path) and FramePattern.parse(path) is not None:
            raise UsageError(
                f"{path} is a sequence of images, and lowtide vae takes and makes video files",
                hint="lowtide video makes one of the other",
            )


def read_only_task(source: Path, settings: VaeSettings) -> VideoTask:
    """Return how frames are read, of any size: no encoder will have to hold them."""
    lossless = replace(settings, codec="ffv1", quality=None, preset=None)
    return video_task(source, _UNWRITTEN, lossless, 1)


def latent_path(output: str | Path) -> Path:
    """Return the path of latents; raises `UsageError` for another suffix than theirs."""
    require_name(output)
    output = Path(output)
    require_replaceable(output)  # a folder has no suffix
    if output.suffix != ".safetensors":
        raise UsageError(
            f"{output} is no name of latents", hint=f"name it {output.with_suffix('.safetensors')}"
        )
    return output


def model_sha256(path: Path) -> str:
    """Return a hash of the content of a model's file, or of all files of its folder."""
    if not is_folder(path):
        return file_sha256(path)
    files = sorted(one for one in path.rglob("*") if one.is_file())
    known = "".join(f"{one.relative_to(path)} {file_sha256(one)}\n" for one in files)
    return hashlib.sha256(known.encode()).hexdigest()


@dataclass(frozen=True)
class FoundClip:
    """Files of a job, checked before the model is loaded.

    Attributes:
        operation: What becomes of them.
        source: The input.
        target: The output; None for a round trip that only compares.
        task: How a video is read, and written if it is; None of latents.
        latents: Latents (1, C, n, h, w) of a file, None of a video.
        stated: What the file of latents says of its clip.
    """

    operation: Operation
    source: Path
    target: Path | None
    task: VideoTask | None
    latents: Tensor | None
    stated: ClipFacts | None

    def clip(self, autoencoder: ClipAutoencoder, settings: VaeSettings) -> VaeClip:
        """Return the clip for a model; raises `InputError` for latents of another one."""
        if self.latents is None:
            assert self.task is not None
            return VaeClip(self, self.task, ClipShapes.of_video(autoencoder, self.task))
        assert self.target is not None
        facts = checked_facts(self.source, autoencoder, self.latents, self.stated, settings)
        encoder = settings.encoder_settings(facts.picture.bits, self.target)
        task = task_of_latents(self.source, self.target, facts, encoder)
        return VaeClip(self, task, ClipShapes.of_latents(self.latents, facts, autoencoder))


@dataclass(frozen=True)
class VaeClip:
    """A clip that is encoded, decoded or both: its files, its frames, and its sizes."""

    found: FoundClip
    task: VideoTask
    shapes: ClipShapes

    @property
    def notes(self) -> list[str]:
        """What the user should know of its frames."""
        writes = self.found.operation != "encode" and self.found.target is not None
        return list(self.task.notes if writes else self.task.facts.notes)


def find_clip(
    operation: Operation,
    source: str | Path,
    output: str | Path | None,
    settings: VaeSettings,
    *,
    force: bool,
) -> FoundClip:
    """Check the files of a job, and inspect its input.

    Raises:
        UsageError: The output exists or is the input, or a name is of another kind of file.
        OutputError: The output cannot be written.
        VideoError: The video is damaged, or of a kind that is not supported.
        InputError: There are no latents, or such that are not finite.
    """
    source, target = Path(source), None if output is None else Path(output)
    if operation == "encode" and target is not None:
        target = latent_path(target)
    if target is not None:
        require_output(target, force=force, makes_folder=True)
        require_distinct([target], [source])
    if operation == "decode":
        require_videos(target)
        return FoundClip(operation, source, target, None, *read_latents(source))
    if operation == "encode" or target is None:
        require_videos(source)
        task = read_only_task(source, settings)
    else:
        require_videos(source, target)
        task = video_task(source, target, settings, 1)
    return FoundClip(operation, source, target, task, None, None)


@dataclass(frozen=True)
class ClipShapes:
    """Sizes of a clip: what is read or written, what the model takes or makes, and latents.

    Attributes:
        frames: Frames, height and width of the video.
        padded: The same, as latents make them.
        latents: Channels, number, height and width.
    """

    frames: tuple[int, int, int]
    padded: tuple[int, int, int]
    latents: tuple[int, int, int, int]

    @classmethod
    def of_video(cls, autoencoder: ClipAutoencoder, task: VideoTask) -> ClipShapes:
        """Return the sizes of a video and of its latents."""
        shape = task.frames, task.stored.height, task.stored.width
        time_ratio, space = autoencoder.ratios
        frames, height, width = padded = autoencoder.padded(shape)
        latents = 1 + (frames - 1) // time_ratio, height // space, width // space
        return cls(shape, padded, (autoencoder.latent_channels, *latents))

    @classmethod
    def of_latents(
        cls, latents: Tensor, facts: ClipFacts, autoencoder: ClipAutoencoder
    ) -> ClipShapes:
        """Return the sizes of latents (1, C, n, h, w) and of the video that they become."""
        channels, *rest = latents.shape[1:]
        number, height, width = rest
        made = autoencoder.made((number, height, width))
        return cls(
            (facts.frames, facts.height, facts.width), made, (channels, number, height, width)
        )

    def for_report(self) -> dict[str, Any]:
        """Return them as fields of a report."""
        frames, height, width = self.frames
        return {"frames": frames, "height": height, "width": width, "latents": self.latents}


def checked_facts(
    source: Path,
    autoencoder: ClipAutoencoder,
    latents: Tensor,
    stated: ClipFacts | None,
    settings: VaeSettings,
) -> ClipFacts:
    """Return what latents state of their clip; raises `InputError` if they are of another model."""
    channels, number, height, width = latents.shape[1:]
    if channels != autoencoder.latent_channels:
        raise InputError(
            f"{source} has latents of {channels} channels, and those of this {autoencoder.kind}"
            f" have {autoencoder.latent_channels}"
        )
    made = autoencoder.made((number, height, width))
    if stated is None:
        return default_clip_facts(*made, settings.fps or _USUAL_FPS)
    if stated.model != autoencoder.kind:
        raise InputError(
            f"{source} has latents of {stated.model}, and the model is {autoencoder.kind}"
        )
    if autoencoder.padded((stated.frames, stated.height, stated.width)) != made:
        raise InputError(
            f"{source}: {number} latents of {height}×{width} make {made[0]} frames of"
            f" {made[1]}×{made[2]}, not the {stated.frames} of {stated.height}×{stated.width} it"
            " names"
        )
    if settings.fps is not None:
        raise UsageError(f"{source} says when its frames are shown", hint="drop --fps")
    return stated
