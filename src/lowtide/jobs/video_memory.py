"""Host memory of reading and encoding the frames of a video."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.jobs.video_threads import WAITING_FRAMES
from lowtide.media.video.picture_format import PictureFormat

if TYPE_CHECKING:
    from lowtide.media.video.encoder_settings import EncoderSettings

# Frames of a decoder: references and those that wait for their turn, 16 at most.
_DECODED, _MOST_DECODED = 6, 18
# Bytes of libraries and of their tables.
_FIXED_BYTES = 12 << 20


def frame_bytes(format: PictureFormat) -> int:
    """Return the bytes of the planes of one frame."""
    return sum(rows * columns for rows, columns in format.plane_shapes) * (
        format.plane_dtype.itemsize
    )


def reading_bytes(format: PictureFormat) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of decoding frames of a format."""
    one, here = frame_bytes(format), WAITING_FRAMES + 3
    return (
        _FIXED_BYTES + one * (_MOST_DECODED + here),
        _FIXED_BYTES // 2 + one * (_DECODED + here),
    )


def writing_bytes(format: PictureFormat, encoder: EncoderSettings) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of encoding frames of a format."""
    one = frame_bytes(format)
    held = one * (WAITING_FRAMES + 2)
    most, usual = 70, 60
    return _FIXED_BYTES + held + one * most, _FIXED_BYTES // 2 + held + one * usual
