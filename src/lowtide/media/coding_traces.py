"""What pictures and clips show of strong coding: quantization, blocks, bytes of key frames."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyvips

from lowtide.core.errors import ImageError
from lowtide.media._libvips import FILE_ERRORS, libvips_error_text
from lowtide.media.formats import JPEG
from lowtide.media.image_facts import MAX_PIXELS, inspect_image, open_decoder
from lowtide.media.metadata import jpeg_segments
from lowtide.media.video.opened_video import (
    decoder_of,
    load_av,
    open_video,
    packets_with_data,
    readable_packets,
)

# JPEGs of a higher quality are enlarged as well, or better, by networks that saw clean pictures.
_HIGHEST_QUALITY = 92
# Mean of the luma table of ITU T.81, annex K, which encoders scale by the quality.
_USUAL_STEP = 57.625
# Markers of a table, and of what tells the components: all of these but tables and extensions.
_QUANTIZATION = 0xDB
_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Pixels looked at, from the middle of a picture.
_ROWS, _COLUMNS = 768, 1024
_BLOCK, _SHORTEST = 8, 64
# Of decoders that hold more than this, as for interlaced PNG, no pixels are looked at.
_DECODER_BYTES = 64 << 20
_FULL = {"B": 1.0, "H": 255 / 65535, "f": 255.0, "d": 255.0}  # to levels of 255, by NumPy's names
# A step across the edge of blocks, in those elsewhere, and in their standard deviations.
_STEP, _DEVIATIONS = 1.16, 2.0
_LARGEST_STEP = 20.0  # of 255: larger ones are edges of the picture

# Key frames that are looked at, among so many packets from the start.
_KEY_FRAMES, _PACKETS = 3, 600
# Quality of the JPEGs, in gray: up to that, pictures are better enlarged by networks for JPEGs.
_QUALITY = 92
# Share of their bytes below which frames are so too. Codecs that smooth the edges of their blocks
# as well as these take fewer bytes for as good a frame.
_SHARE, _SMOOTH_SHARE = 0.75, 0.35
_SMOOTH = ("hevc", "vp9", "av1", "vvc")
# Bits a pixel of a JPEG of which nothing can be told: one of hardly anything but black.
_FLAT_BITS = 0.2


def jpeg_trace(path: Path) -> str:
    """Return what shows that a picture is or was a JPEG of a quality that leaves blocks, or "".

    As a name for it: "a JPEG of quality about 40". The level of a file's own tables is exact for
    encoders that scale the standard's; of other pictures the grid of blocks is looked for.

    Raises:
        ImageError: The file cannot be read.
    """
    facts = inspect_image(path)
    if facts.format == JPEG.name:
        quality = _quality(path)
        return f"a JPEG of quality about {quality}" if quality <= _HIGHEST_QUALITY else ""
    if facts.resident_bytes > _DECODER_BYTES or not _has_grid(_luma(path)):
        return ""
    return "made from a JPEG, whose blocks it shows"


def _luma(path: Path) -> np.ndarray:
    """Return the middle of a picture in levels of 255: the mean of its colors (H, W), float32."""
    image = open_decoder(path, MAX_PIXELS).image
    height, width = min(image.height, _ROWS), min(image.width, _COLUMNS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    try:
        values = image.crop(left, top, width, height).numpy()
    except FILE_ERRORS as error:
        raise ImageError(f"{path}: damaged ({libvips_error_text(error)})") from error
    colors = values.reshape(height, width, -1)[..., : 3 if image.bands >= 3 else 1]
    return colors.mean(axis=2, dtype=np.float32) * np.float32(_FULL.get(values.dtype.char, 1.0))


def _has_grid(luma: np.ndarray) -> bool:
    """Whether there is a step at every eighth pixel, along rows and along columns."""
    if min(luma.shape) < _SHORTEST:
        return False
    return all(_is_step(_steps(one)) for one in (luma, luma.T))


def _steps(luma: np.ndarray) -> np.ndarray:
    """Return the mean third differences along rows, at each of eight places in a block."""
    steps = np.abs(luma[:, :-3] - luma[:, 3:] + 3 * (luma[:, 2:-1] - luma[:, 1:-2]))
    whole = np.minimum(steps, _LARGEST_STEP)[:, : steps.shape[1] // _BLOCK * _BLOCK]
    return whole.reshape(len(luma), -1, _BLOCK).mean(axis=(0, 1))


def _is_step(means: np.ndarray) -> bool:
    others = np.delete(means, means.argmax())
    above = means.max() - others.mean()
    return means.max() > _STEP * others.mean() and above > _DEVIATIONS * others.std()


def _quality(path: Path) -> int:
    """Return the quality of a JPEG's first table of luma, as usual encoders count it."""
    for table in _tables(path).values():
        percent = 100 * float(table.mean()) / _USUAL_STEP
        return max(1, round(100 - percent / 2 if percent <= 100 else 5000 / percent))
    return 100


def color_step(path: Path) -> float:
    """Return a JPEG's usual step of colors, in levels of 255: weaker noise of colors is gone.

    It is infinite for a gray one.
    """
    tables = _tables(path)
    for marker, data in jpeg_segments(path):
        if marker in _FRAMES and len(data) >= 6:
            components = [data[at : at + 3] for at in range(6, len(data) - 2, 3)]
            if len(components) < 3:
                return math.inf
            table = tables.get(components[1][2])
            return float(np.median(table)) if table is not None else 0.0
    return 0.0


def _tables(path: Path) -> dict[int, np.ndarray]:
    """Return a JPEG's quantization tables (64,) by their numbers, in the order of the file."""
    found: dict[int, np.ndarray] = {}
    for marker, data in jpeg_segments(path):
        while marker == _QUANTIZATION and data:
            wide, number = divmod(data[0], 16)
            length = 1 + 64 * (1 + (wide > 0))
            if len(data) < length:
                break
            found[number] = np.frombuffer(data[1:length], ">u2" if wide else np.uint8)
            data = data[length:]
    return found


def coding_trace(path: Path) -> str:
    """Return what shows that a clip is strongly coded, or "": "hevc at 21 % of a JPEG's bytes".

    Raises:
        VideoError: It cannot be read.
    """
    load_av()
    stored = jpegs = 0
    with open_video(path) as (container, stream):
        name = _codec(stream.codec_context.name)
        packets = islice(packets_with_data(readable_packets(container.demux(stream))), _PACKETS)
        for packet in islice((one for one in packets if one.is_keyframe), _KEY_FRAMES):
            for frame in _decoded(stream, packet)[:1]:
                size = _jpeg_bytes(frame)
                if 8 * size > _FLAT_BITS * frame.width * frame.height:
                    stored, jpegs = stored + packet.size, jpegs + size
    if stored >= jpegs * (_SMOOTH_SHARE if name in _SMOOTH else _SHARE):
        return ""
    return f"{name} whose key frames have {stored / jpegs:.0%} of a good JPEG's bytes"


def _codec(name: str) -> str:
    """Return FFmpeg's name of a codec by that of its decoder: av1 of libdav1d."""
    return next((one for one in _SMOOTH if one in name), name)


def _decoded(stream: Any, packet: Any) -> list[Any]:
    decoder = decoder_of(stream)
    try:
        return [*decoder.decode(packet), *decoder.decode(None)]
    except load_av().error.FFmpegError:  # whose own turn says so
        return []
    finally:
        decoder.flush_buffers()


def _jpeg_bytes(frame: Any) -> int:
    gray = frame.reformat(format="gray").to_ndarray()
    return len(pyvips.Image.new_from_array(gray).jpegsave_buffer(Q=_QUALITY))
