"""What a clip shows of being strongly coded: the bytes of its key frames against those of JPEGs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pyvips

from lowtide.media.video.opened_video import (
    decoder_of,
    load_av,
    open_video,
    packets_with_data,
    readable,
)

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


def coding_trace(path: Path) -> str:
    """Return what shows that a clip is strongly coded, or "": "hevc at 21 % of a JPEG's bytes".

    Raises:
        VideoError: It cannot be read.
    """
    load_av()
    stored = jpegs = 0
    with open_video(path) as (container, stream):
        name = _codec(stream.codec_context.name)
        packets = islice(packets_with_data(readable(container.demux(stream))), _PACKETS)
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
