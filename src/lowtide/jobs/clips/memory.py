"""Host memory of reading and encoding the frames of a video."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.core.units import MIB
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import output_cost
from lowtide.media.video.encoder_settings import CODECS, VideoEncoderSettings
from lowtide.media.video.picture_format import PictureFormat

# Frames that wait on each side, as those that a network has read or made.
WAITING_FRAMES = 2
# Frames of a decoder: references and those that wait for their turn, 16 at most.
_DECODED, _MOST_DECODED = 6, 18
_DECODER_BYTES = 6 * MIB
# How much more an encoder takes for some contents.
_SPREAD = 1.4


class _Held(NamedTuple):
    """Memory of an encoder: bytes whatever the picture, and frames."""

    fixed: int
    frames: int


# Without looking ahead, by default, and of the slowest preset: measured from 160×96 to 1280×720 in
# 8 bits, to the end of 120 frames; flat ones take less, and noise of full scale up to the spread.
_ENCODERS = {
    "x264": (_Held(12 * MIB, 48), _Held(12 * MIB, 160), _Held(31 * MIB, 275)),
    "x265": (_Held(34 * MIB, 88), _Held(58 * MIB, 138), _Held(58 * MIB, 330)),
    "svtav1": (_Held(45 * MIB, 300), _Held(45 * MIB, 300), _Held(82 * MIB, 600)),
    "prores": (_Held(4 * MIB, 5),) * 3,
    "ffv1": (_Held(8 * MIB, 32),) * 3,
}
_BLIND_PRESETS = ("ultrafast", "superfast")


def frame_bytes(format: PictureFormat) -> int:
    """Return the bytes of the planes of one frame."""
    samples = sum(rows * columns for rows, columns in format.plane_shapes)
    return samples * format.plane_dtype.itemsize


def reading_bytes(format: PictureFormat, held: int = 0) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of decoding frames; ``held`` more are kept."""
    one, here = frame_bytes(format), WAITING_FRAMES + 3 + held
    return 2 * _DECODER_BYTES + one * (_MOST_DECODED + here), _DECODER_BYTES + one * (
        _DECODED + here
    )


def writing_bytes(format: PictureFormat, settings: VideoEncoderSettings) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of encoding frames of a format."""
    one, (blind, default, slow) = frame_bytes(format), _ENCODERS[settings.codec]
    encoder = slow if _is_slow(settings) else default
    if settings.preset in _BLIND_PRESETS:
        encoder = blind
    held, usual = one * (WAITING_FRAMES + 2), encoder.fixed + one * encoder.frames
    return held + int(usual * _SPREAD), held + usual


def image_reading_bytes(format: PictureFormat, decoding: tuple[int, int]) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of reading images, each ``decoding`` so many."""
    held = frame_bytes(format) * (WAITING_FRAMES + 3)
    taken, usual = decoding
    return held + taken, held + usual


def image_writing_bytes(format: PictureFormat, name: str) -> tuple[int, int]:
    """Return an upper bound and the usual bytes of writing images of a file format ``name``."""
    channels, sample = len(format.plane_shapes), "uint8" if format.bits == 8 else "uint16"
    info = ImageInfo(format.width, format.height, channels, sample)
    # Frames that wait, and one as rows for the encoder, or read back.
    held = frame_bytes(format) * (WAITING_FRAMES + 4)
    cost = output_cost(f"frame.{name.lower()}", info)
    return held + cost.resident_bytes, held + cost.typical_bytes


def _is_slow(settings: VideoEncoderSettings) -> bool:
    """Return whether a preset is slower than the default, and so holds more frames."""
    codec = CODECS[settings.codec]
    if settings.preset is None or codec.preset is None:
        return False
    place, usual = (codec.presets.index(one) for one in (settings.preset, codec.preset))
    # The presets of x264 and x265 are ordered from fast to slow, those of svtav1 the other way.
    return place < usual if settings.codec == "svtav1" else place > usual
