"""Subtitles of plain text, converted from the form of one container to that of another."""

from __future__ import annotations

from typing import Any


def is_pause(packet: Any) -> bool:
    """Whether a packet of subtitles is MP4's for a time without text: muxers write their own."""
    return bytes(packet) == b"\0\0"


class SubtitleConverter:
    """Converter of a stream's packets.

    Args:
        stream: Subtitles of an opened file.
        output: Container in which the converted stream is made.
        codec: FFmpeg's name of the new form: mov_text, subrip or webvtt.

    Attributes:
        made: The new stream.
    """

    def __init__(self, stream: Any, output: Any, codec: str) -> None:
        stream.codec_context.open(strict=False)  # makes the styles that the text refers to
        self._decoder = stream.codec_context
        self.made: Any = output.add_stream(codec)
        self.made.codec_context.subtitle_header = self._decoder.subtitle_header
        self.made.time_base = stream.time_base

    def convert(self, packet: Any) -> Any | None:
        """A packet's text with the times it had; None of a packet without text."""
        subtitle = self._decoder.decode2(packet)
        if subtitle is None:
            return None
        converted = self.made.codec_context.encode_subtitle(subtitle)
        converted.stream, converted.time_base = self.made, packet.time_base
        converted.pts = packet.pts
        converted.dts = packet.pts
        converted.duration = packet.duration
        converted.is_keyframe = True
        return converted
