"""What an image will be once it is upscaled, from its header alone, and whether its file can be
that: nothing here waits for a model's costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import ImageError
from lowtide.core.signal import ImageInfo
from lowtide.jobs.settings import UpscaleSettings
from lowtide.media import ImageFacts, check_output, inspect_image
from lowtide.media.discover import FilePair


@dataclass(frozen=True)
class TargetSize:
    """An image file, what the model makes of it, what is written, and in which format."""

    facts: ImageFacts
    made: ImageInfo
    written: ImageInfo
    format: str


def target_size(source: Path, target: Path, settings: UpscaleSettings, scale: int) -> TargetSize:
    """Sizes for a model of this ``scale``. A ``target`` without suffix is in the format that the
    settings name, or that of ``source``.

    Raises `ImageError`, `UsageError`, and `OutputError` for what the format cannot hold.
    """
    facts = inspect_image(source, max_pixels=settings.max_pixels)
    info = facts.info
    made = ImageInfo(info.width * scale, info.height * scale, info.bands, info.sample)
    width, height = settings.target_size(info, scale)
    written = ImageInfo(width, height, info.bands, info.sample)
    if written.pixels > settings.max_pixels * 64:
        raise ImageError(
            f"{source}: the result would be {width}×{height} pixels, over 64 times --max-pixels",
            hint="a smaller --scale, or a larger --max-pixels",
        )
    entry = check_output(target, written, settings.format or facts.format)
    return TargetSize(facts, made, written, entry.name)


def scale_checker(jobs: Sequence[FilePair], settings: UpscaleSettings) -> Callable[[int], None]:
    """A call for when the model's scale is known and nothing is measured yet, which may take
    minutes: it raises what `target_size` does of the only image. Of several the others are done."""

    def check(scale: int) -> None:
        if len(jobs) == 1:
            target_size(jobs[0].source, jobs[0].target, settings, scale)

    return check
