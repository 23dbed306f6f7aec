"""Sound that begins before 0 in Matroska, where players leave that out: its codec's delay."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

from lowtide.media.video.opened_video import load_av
from lowtide.media.video.video_containers import add_copy

# Matroska's elements Language, which FFmpeg writes as "und", and CodecDelay, in nanoseconds.
_LANGUAGE = b"\x22\xb5\x9c\x83und"
_CODEC_DELAY = b"\x56\xaa\x84"
_SECOND = 10**9


def add_delayed_copy(output: Any, stream: Any, first: Any, delay: Fraction) -> Any:
    """Add a stream as `add_copy` does, of which players leave out the beginning.

    PyAV gives no access to a stream's delay, but takes over that of a file it reads: one is written
    with a header of this stream, of equal length with the delay in it.

    Args:
        output: Matroska or WebM file that has no header yet.
        stream: Sound of an opened file.
        first: Its first packet.
        delay: Seconds that are left out, less than 4.
    """
    av, made = load_av(), io.BytesIO()
    with av.open(made, "w", format="matroska", options={"write_crc32": "0"}) as file:
        packet = av.Packet(bytes(first))
        packet.stream, packet.time_base = add_copy(file, stream), first.time_base
        packet.pts = packet.dts = 0
        file.mux_one(packet)
    element = _CODEC_DELAY + round(delay * _SECOND).to_bytes(4, "big")
    header = made.getvalue().replace(_LANGUAGE, element, 1)
    with av.open(io.BytesIO(header)) as opened:
        return add_copy(output, opened.streams[0])
