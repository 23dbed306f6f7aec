"""The bundled model that suits the files of a job, where none is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lowtide.core.errors import ImageError, VideoError

# Upscalers: for clean pictures, and for those that were coded as JPEGs.
CLEAN, PHOTO = "lowtide-x{}", "lowtide-photo-x{}"
# Denoisers: for ordinary pictures in one step; and for gray ones and all else, such as RAW files.
PHOTO_DENOISER, DENOISER = "lowtide-photo-denoise", "lowtide-denoise"
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
    if known := _as_earlier((clean, photo), before):
        return known
    trace_of = _clip_trace if clips else _picture_trace
    looked_at = _some_of(files)
    traces = [trace for file in looked_at if (trace := _trace(file, trace_of))]
    if not traces or 2 * len(traces) < len(looked_at):
        return clean, f"no trace of strong {'' if clips else 'JPEG '}coding"
    if len(looked_at) == 1:
        return photo, traces[0]
    what = "clips are strongly coded" if clips else "pictures are or were JPEGs"
    return photo, f"{len(traces):,} of {len(looked_at):,} {what}"


def suited_denoiser(files: Sequence[Path], before: Iterable[str] = ()) -> tuple[str, str]:
    """Return the name of a bundled denoiser of pictures, and why it is taken.

    That of gray pictures is for files most of which are. Arguments are those of
    `suited_upscaler`.
    """
    if known := _as_earlier((PHOTO_DENOISER, DENOISER), before):
        return known
    looked_at = _some_of(files)
    gray = sum(map(_is_gray, looked_at))
    if 2 * gray <= len(looked_at):
        return PHOTO_DENOISER, "for color pictures"
    return DENOISER, "for gray pictures"


def _as_earlier(names: tuple[str, ...], before: Iterable[str]) -> tuple[str, str] | None:
    known = set(names) & set(before)
    return (known.pop(), "as earlier files in the output folder") if len(known) == 1 else None


def _some_of(files: Sequence[Path]) -> Sequence[Path]:
    return files[:: -(-len(files) // _MOST_FILES)]


def _is_gray(file: Path) -> bool:
    from lowtide.media.image_facts import inspect_image  # not for help, since it loads libvips

    try:
        return inspect_image(file).info.color_channels == 1
    except ImageError:  # whose own turn says so
        return False


def _trace(file: Path, trace_of: Callable[[Path], str]) -> str:
    try:
        return trace_of(file)
    except (ImageError, VideoError):  # whose own turn says so
        return ""


def _picture_trace(file: Path) -> str:
    from lowtide.media.coding_traces import jpeg_trace  # not for help, since it loads libvips

    return jpeg_trace(file)


def _clip_trace(file: Path) -> str:
    from lowtide.media.coding_traces import coding_trace

    return coding_trace(file)
