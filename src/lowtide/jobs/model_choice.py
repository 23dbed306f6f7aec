"""The bundled upscaler that suits the files of a job, where none is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lowtide.core.errors import ImageError, VideoError

# For clean pictures, and for those that were coded as JPEGs.
CLEAN, PHOTO = "lowtide-x{}", "lowtide-photo-x{}"
# Of many files so many are looked at, spread over all.
_MOST_FILES = 16


def suited_upscaler(
    files: Sequence[Path], scale: int, before: Iterable[str] = (), *, clips: bool = False
) -> tuple[str, str]:
    """Return the name of a bundled upscaler, and why it is taken.

    Files of one job have one model: that for JPEGs where half of them are, or more, or are as
    strongly coded.

    Args:
        files: The pictures, or ``clips``; one that cannot be read counts as clean.
        scale: Of the model, 2 or 4.
        before: Names of the models that earlier files of the output folder were made with, one of
            which goes on.
    """
    clean, photo = CLEAN.format(scale), PHOTO.format(scale)
    if (known := {clean, photo} & set(before)) and len(known) == 1:
        return known.pop(), "as earlier files in the output folder"
    trace_of = _clip_trace if clips else _picture_trace
    looked_at = files[:: -(-len(files) // _MOST_FILES)]
    traces = [trace for file in looked_at if (trace := _trace(file, trace_of))]
    if not traces or 2 * len(traces) < len(looked_at):
        return clean, f"no trace of strong {'' if clips else 'JPEG '}coding"
    if len(looked_at) == 1:
        return photo, traces[0]
    what = "clips are strongly coded" if clips else "pictures are or were JPEGs"
    return photo, f"{len(traces):,} of {len(looked_at):,} {what}"


def _trace(file: Path, trace_of: Callable[[Path], str]) -> str:
    try:
        return trace_of(file)
    except (ImageError, VideoError):  # whose own turn says so
        return ""


def _picture_trace(file: Path) -> str:
    from lowtide.media.coding_traces import jpeg_trace  # not for help, since it loads libvips

    return jpeg_trace(file)


def _clip_trace(file: Path) -> str:
    from lowtide.media.video.key_frame_bytes import coding_trace

    return coding_trace(file)
