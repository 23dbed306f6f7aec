"""The bundled upscaler that suits the files of a job, where none is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lowtide.core.errors import ImageError

# For clean pictures, and for those that were coded as JPEGs.
CLEAN, PHOTO = "lowtide-x{}", "lowtide-photo-x{}"
# Of many files so many are looked at, spread over all.
_MOST_FILES = 64


def suited_upscaler(
    files: Sequence[Path], scale: int, before: Iterable[str] = ()
) -> tuple[str, str]:
    """Return the name of a bundled upscaler, and why it is taken.

    Files of one job have one model: that for JPEGs where half of them are, or more.

    Args:
        files: The pictures; one that cannot be read counts as clean.
        scale: Of the model, 2 or 4.
        before: Names of the models that earlier files of the output folder were made with, one of
            which goes on.
    """
    clean, photo = CLEAN.format(scale), PHOTO.format(scale)
    if (known := {clean, photo} & set(before)) and len(known) == 1:
        return known.pop(), "as earlier files in the output folder"
    looked_at = files[:: -(-len(files) // _MOST_FILES)]
    traces = [trace for file in looked_at if (trace := _trace(file))]
    if not traces or 2 * len(traces) < len(looked_at):
        return clean, "no trace of strong JPEG coding"
    if len(looked_at) == 1:
        return photo, traces[0]
    return photo, f"{len(traces):,} of {len(looked_at):,} pictures are or were JPEGs"


def _trace(file: Path) -> str:
    from lowtide.media.coding_traces import jpeg_trace  # not for help, since it loads libvips

    try:
        return jpeg_trace(file)
    except ImageError:  # whose own turn says so
        return ""
