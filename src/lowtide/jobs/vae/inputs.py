"""Files that go into a video autoencoder, and what comes out, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.core.atomic_file import require_name, require_replaceable
from lowtide.core.errors import InputError, UsageError
from lowtide.core.input_file import exists
from lowtide.integrations.clip_autoencoder import ClipAutoencoder
from lowtide.jobs.clips.task import VideoTask, video_task
from lowtide.jobs.vae.clip_facts import ClipFacts, default_clip_facts
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
    return video_task(source, _UNWRITTEN, lossless.video_settings(), 1)


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

    def for_report(self) -> dict[str, object]:
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
