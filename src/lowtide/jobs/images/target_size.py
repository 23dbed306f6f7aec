"""Size and format of a result, from the input's header alone.

Nothing here waits for a model's costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.core.errors import ImageError, OutputError
from lowtide.jobs.images.settings import ImageSettings
from lowtide.media import (
    EncodingMemory,
    ImageFacts,
    inspect_image,
    output_cost,
    require_format_holds,
)
from lowtide.media.formats import output_format
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_source import is_opaque


@dataclass(frozen=True)
class TargetSize:
    """Input header, the model's output, the written image, and the file format.

    ``writing`` is the memory of what makes the file of the model's output, and ``resize_to`` the
    (W, H) that the encoder resizes it to, or None. ``codecs_stay`` is whether reading and writing
    hold their memory from image to image, as for the frames of a video.
    """

    facts: ImageFacts
    upscaled: ImageInfo
    output: ImageInfo
    format: str
    writing: EncodingMemory
    resize_to: tuple[int, int] | None = None
    codecs_stay: bool = False

    @property
    def codec_memory(self) -> dict[str, Any]:
        """The (usual, largest) bytes of reading and writing, as fields of an `ImageTask`."""
        reading = self.facts.typical_bytes, self.facts.resident_bytes
        writing = self.writing.typical_bytes, self.writing.resident_bytes
        rows, last = self.writing.collecting, (0, 0)
        if rows is not None:
            writing, last = (rows.typical, rows.upper), writing
        return {
            "codec_bytes": (reading, writing),
            "finishing_bytes": last,
            "codecs_stay": self.codecs_stay,
        }


def drops_alpha(target: Path, settings: ImageSettings, facts: ImageFacts) -> bool:
    """Return whether the format of a result holds no alpha."""
    return not output_format(target, settings.format or facts.format).alpha


def target_size(
    source: Path,
    target: Path,
    settings: ImageSettings,
    scale: int,
    facts: ImageFacts | None = None,
) -> TargetSize:
    """Return the sizes and the format of a result for a model of this ``scale``.

    A ``target`` without suffix takes the format that the settings name, or that of ``source``.
    ``facts`` are the header of ``source``, which is read by default.

    Raises:
        ImageError: The input cannot be read.
        UsageError: The settings do not suit the image.
        OutputError: The format cannot hold the result.
    """
    facts = facts or inspect_image(source, max_pixels=settings.max_pixels)
    drops = facts.info.alpha and drops_alpha(target, settings, facts)
    if drops and is_opaque(source, settings.max_pixels):
        opaque = replace(facts.info, channels=facts.info.color_channels)
        notes = (*facts.notes, "alpha is full everywhere, and left out")
        facts = replace(facts, info=opaque, notes=notes)
    info = facts.info
    upscaled = ImageInfo(info.width * scale, info.height * scale, info.channels, info.sample_type)
    width, height = settings.target_size(info, scale)
    output = ImageInfo(width, height, info.channels, info.sample_type)
    if output.pixels > settings.max_pixels * 64:
        raise ImageError(
            f"{source}: the result would be {width}×{height} pixels, over 64 times --max-pixels",
            hint="a smaller --scale, or a larger --max-pixels",
        )
    entry = require_format_holds(target, output, settings.format or facts.format)
    if facts.color is not None and facts.color.description is None and entry.name != "PNG":
        raise OutputError(
            f"{target}: the color of {source} is {facts.color.name}, and {entry.name} is written"
            " with profiles, which do not tell that",
            hint=f"write a PNG: -o {target.with_suffix('.png')}, or --format png",
        )
    resized = upscaled if upscaled != output else None
    writing = output_cost(
        target, output, settings.encode_options, resized_from=resized, default_format=entry.name
    )
    return TargetSize(
        facts, upscaled, output, entry.name, writing, (width, height) if resized else None
    )
