"""Copying a source's sound, subtitles, attachments, cover and chapters to an output.

Subtitles of plain text are converted from the form of one container to that of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.core.errors import InputError
from lowtide.media.video.opened_video import load_av, open_source, packets_with_data
from lowtide.media.video.other_streams import (
    PlannedStream,
    StreamPlan,
    copied_metadata,
    cover_file,
    file_metadata,
)
from lowtide.media.video.packet_times import SampleClock, TimeWindow, WrittenStream


class StreamCopier:
    """Copier of all streams of a plan but the picture.

    Args:
        plan: What becomes of the streams.
        window: How times of the source become times of the output.
        source: The opened source.

    Attributes:
        written: What was written of each stream, by its index in the source.
    """

    def __init__(self, plan: StreamPlan, window: TimeWindow, source: Any) -> None:
        self.written: dict[int, WrittenStream] = {}
        self._plan, self._window, self._source = plan, window, source
        self._made: dict[int, Any] = {}
        self._converters: dict[int, SubtitleConverter] = {}
        self._clocks: dict[int, SampleClock] = {}

    def add(self, output: Any) -> None:
        """Make the streams, chapters and tags in an output that has no header yet."""
        for planned in self._plan.kept:
            stream = self._source.streams[planned.index]
            if planned.into == "attachment":
                self._attach_cover(output, stream)
            elif planned.kind == "attachment":
                output.add_stream_from_template(stream)
            else:
                self._add_stream(output, stream, planned)
        output.metadata.update(file_metadata(self._source))
        output.set_chapters(self._window.chapters(self._source.chapters()))

    def packets(self) -> Iterator[Any]:
        """Packets with the stamps and streams of the output, as they come in the source.

        Raises:
            InputError: The source cannot be read to its end.
        """
        if not self._made:
            return
        streams = [self._source.streams[index] for index in self._made]
        for packet in packets_with_data(self._read(streams)):
            index = packet.stream_index
            if not self._is_kept(packet, self.written[index].kind):
                continue
            if index in self._clocks:
                self._clocks[index].set(packet)
            converter = self._converters.get(index)
            made = iter([packet]) if converter is None else converter.convert(packet)
            yield from self._placed(made, index)
        for index, converter in self._converters.items():
            yield from self._placed(converter.flush(), index)

    def notes(self) -> tuple[str, ...]:
        """What was not as it should have been."""
        return tuple(
            f"{written.corrected} packets of {written.kind} {index} went back in time, and were"
            " moved"
            for index, written in self.written.items()
            if written.corrected
        )

    def _add_stream(self, output: Any, stream: Any, planned: PlannedStream) -> None:
        index, container = planned.index, self._plan.container
        if planned.into:
            converter = SubtitleConverter(stream, output, planned.into)
            self._converters[index], made = converter, converter.made
        else:
            made = output.add_stream_from_template(stream, opaque=True)
        made.metadata.update(copied_metadata(stream.metadata, container))
        made.disposition = int(stream.disposition)
        if planned.kind == "audio" and container in ("mp4", "mov"):
            sound = stream.codec_context
            self._clocks[index] = SampleClock(sound.sample_rate, sound.frame_size)
        # Sound in frames of its own loses their headers in a file that has one for all.
        framed = planned.codec == "aac" and not stream.codec_context.extradata
        self._made[index] = made
        self.written[index] = WrittenStream(planned.kind, whole=not framed)

    def _attach_cover(self, output: Any, stream: Any) -> None:
        """Attach a cover, which has one packet, as the file that it is."""
        assert self._plan.source is not None
        with open_source(self._plan.source) as again:
            packets = again.demux(again.streams[stream.index])
            cover, name = next(packets_with_data(packets), None), cover_file(stream)
            if cover is not None and name is not None:
                output.add_attachment(*name, bytes(cover))

    def _is_kept(self, packet: Any, kind: str) -> bool:
        """Whether a packet belongs to the output, to whose part it may be clipped."""
        if kind == "cover":
            return True
        if kind == "subtitle":
            return not is_pause(packet) and self._window.clip(packet)
        return self._window.has(packet)

    def _read(self, streams: list[Any]) -> Iterator[Any]:
        try:
            yield from self._source.demux(*streams)
        except load_av().error.FFmpegError as error:
            raise InputError(f"{self._plan.source}: sound cannot be read ({error})") from error

    def _placed(self, packets: Iterator[Any], index: int) -> Iterator[Any]:
        written = self.written[index]
        for packet in packets:
            packet.stream = self._made[index]
            if written.kind == "cover":
                packet.pts = packet.dts = 0
            else:
                self._window.move(packet)
            written.require_rising(packet)
            written.add(packet)
            yield packet


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
        self.made.time_base = stream.time_base

    def convert(self, packet: Any) -> Iterator[Any]:
        """Packets of the texts that are known to end, a packet's own among them or not yet."""
        subtitle = self._decoder.decode2(packet)
        lines = [] if subtitle is None else [rect.dialogue.decode() for rect in subtitle.rects]
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
