"""Subtitles converted from the form of one container to that of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_DRAWING = re.compile(r"\\p[1-9]")  # a shape in the styled text of ASS


def is_pause(packet: Any) -> bool:
    """Whether a packet of subtitles is MP4's for a time without text: muxers write their own."""
    return bytes(packet) == b"\0\0"


@dataclass(frozen=True)
class Cue:
    """Text shown from stamp ``begin`` to before ``end``, with ASS's marks of style."""

    begin: int
    end: int
    text: str


class CueTimeline:
    """Cues made to follow each other: those shown together become one of several lines.

    MP4 shows one text at a time, and would end a cue where the next one begins.
    """

    def __init__(self) -> None:
        self._shown: list[Cue] = []
        self._at = 0

    def add(self, cue: Cue) -> Iterator[Cue]:
        """Cues that end by the beginning of ``cue``, which begins no earlier than the last one."""
        yield from self.flush(cue.begin)
        self._shown.append(cue)
        self._at = cue.begin

    def flush(self, limit: int | None = None) -> Iterator[Cue]:
        """Cues up to stamp ``limit``, or all."""
        while self._shown and (limit is None or self._at < limit):
            ends = [cue.end for cue in self._shown]
            stop = min(ends if limit is None else [*ends, limit])
            if stop > self._at:
                yield Cue(self._at, stop, "\\N".join(cue.text for cue in self._shown))
            self._at = stop
            self._shown = [cue for cue in self._shown if cue.end > stop]


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
        self._time_base = stream.time_base
        self._timeline = CueTimeline() if codec == "mov_text" else None
        self.made: Any = output.add_stream(codec)
        self.made.codec_context.subtitle_header = self._decoder.subtitle_header
        self.made.codec_context.open()
        self.made.time_base = stream.time_base

    def convert(self, packet: Any) -> Iterator[Any]:
        """Packets of the texts that are known to end, a packet's own among them or not yet."""
        subtitle = self._decoder.decode2(packet)
        lines = [] if subtitle is None else [rect.dialogue.decode() for rect in subtitle.rects]
        lines = [line for line in lines if not _DRAWING.search(line)]
        if not any(lines):
            return
        cue = Cue(packet.pts, packet.pts + (packet.duration or 0), "\\N".join(lines))
        cues = [cue] if self._timeline is None else self._timeline.add(cue)
        yield from map(self._packet, cues)

    def flush(self) -> Iterator[Any]:
        """Packets of the texts that were still shown at the end."""
        if self._timeline is not None:
            yield from map(self._packet, self._timeline.flush())

    def _packet(self, cue: Cue) -> Any:
        from av.subtitles.subtitle import SubtitleSet

        event = f"0,0,Default,,0,0,0,,{cue.text}".encode()
        subtitle = SubtitleSet.create(event, 0, 0)
        packet = self.made.codec_context.encode_subtitle(subtitle)
        packet.stream, packet.time_base = self.made, self._time_base
        packet.pts = packet.dts = cue.begin
        packet.duration = cue.end - cue.begin
        packet.is_keyframe = True
        return packet
