"""Place of chroma samples as a stream states it, which FFmpeg's frames do not show in Python."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lowtide.media.video.pyav import load_av

if TYPE_CHECKING:
    import av
    import av.video.stream

_CENTER = 2
# Formats that state no place and mean this one.
_CENTERED = ("mjpeg", "mpeg1video")
# H.264 and H.265 count from left (0); AV1 knows left (1) and top left (2).
_STATED = re.compile(r"(chroma_sample_loc_type_top_field|chroma_sample_position)\s.*= (\d)")
_OF_AV1 = {1: 1, 2: 3}


def chroma_location(stream: av.video.stream.VideoStream, packet: av.Packet) -> int:
    """Return FFmpeg's number of the chroma location of a stream; 0 where it states none.

    Args:
        stream: Video stream of an open file.
        packet: Its first packet, where the headers of some streams are.
    """
    av = load_av()
    name = stream.codec_context.name
    if name in _CENTERED:
        return _CENTER
    if name not in ("h264", "hevc", "av1", "libdav1d"):
        return 0
    level = av.logging.get_level()
    av.logging.set_level(av.logging.TRACE)
    try:
        with av.logging.Capture() as lines:
            filter = av.bitstream.BitStreamFilterContext("trace_headers", stream)
            filter.filter(av.Packet(bytes(packet)))  # it takes the bytes away
    finally:
        av.logging.set_level(level)
    for _, _, line in lines:
        if found := _STATED.search(line):
            number = int(found[2])
            return _OF_AV1.get(number, 0) if "position" in found[1] else 1 + number
    return 0
