"""Carrying a source's sound, subtitles, attachments, cover and chapters to an output.

Packets are copied. Sound that the container does not hold is encoded, and subtitles are converted
from the form of one container to that of another. Sound that begins before 0 has its codec's delay
in Matroska, where players leave that out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lowtide.core.errors import InputError
from lowtide.media.video.opened_video import (
    load_av,
    open_media_file,
    packets_with_data,
    readable_packets,
)
from lowtide.media.video.other_streams import (
    OutputStreamsPlan,
    PlannedStream,
    copied_metadata,
    cover_file,
    file_metadata,
)
from lowtide.media.video.packet_times import SampleClock, StreamTally, TimeMapping, packet_time
from lowtide.media.video.sound_encoder import SoundEncoder
from lowtide.media.video.video_containers import add_copy

_OPUS_RATE = 48_000  # a second, of the samples that the header of Opus says to leave out
_LEAST_HIDDEN = Fraction(1, 1000)  # seconds, a tick of Matroska

# Matroska's elements Language, which FFmpeg writes as "und", and CodecDelay, in nanoseconds.
_LANGUAGE = b"\x22\xb5\x9c\x83und"
_CODEC_DELAY = b"\x56\xaa\x84"
_SECOND = 10**9
_DRAWING = re.compile(r"\\p[1-9]")  # a shape in the styled text of ASS


class StreamCopier:
    """Copier of all streams of a plan but the picture.

    Args:
        plan: What becomes of the streams.
        window: How times of the source become times of the output.
        source: The opened source.

    Attributes:
        carried: The streams that have packets, by their index in the source.
    """

    def __init__(self, plan: OutputStreamsPlan, window: TimeMapping, source: Any) -> None:
        self.carried: dict[int, CarriedStream] = {}
        self._plan, self._window, self._source = plan, window, source

    def add(self, output: Any) -> None:
        """Make the streams, chapters and tags in an output that has no header yet."""
        for planned in self._plan.kept:
            stream = self._source.streams[planned.index]
            if planned.into == "attachment":
                self._attach_cover(output, stream)
            elif planned.kind == "attachment":
                output.add_stream_from_template(stream)
            else:
                carried = CarriedStream(self._plan, planned, stream, output, self._window)
                self.carried[planned.index] = carried
        if self._plan.picture >= 0:
            output.metadata.update(file_metadata(self._source))
            output.set_chapters(self._window.chapters(self._source.chapters()))

    def packets(self) -> Iterator[Any]:
        """Packets with the stamps and streams of the output, as they come in the source.

        Raises:
            InputError: The source cannot be read to its end.
        """
        if not self.carried:
            return
        for packet in read_streams(self._plan, self._source, list(self.carried)):
            yield from self.carried[packet.stream_index].packets(packet)
        for carried in self.carried.values():
            yield from carried.flush()

    def notes(self) -> tuple[str, ...]:
        """What was not as it should have been."""
        return tuple(
            f"{one.written.corrected} packets of {one.written.kind} {index} went back in time, and"
            " were moved"
            for index, one in self.carried.items()
            if one.written.corrected
        )

    def _attach_cover(self, output: Any, stream: Any) -> None:
        """Attach a cover, which has one packet, as the file that it is."""
        cover, name = _first_packet(self._plan, stream.index), cover_file(stream)
        if cover is not None and name is not None:
            output.add_attachment(*name, bytes(cover))


def read_streams(plan: OutputStreamsPlan, source: Any, indices: list[int]) -> Iterator[Any]:
    """Packets of some streams of an opened source.

    A video is read as far as that is possible. Raises `InputError` where another file of sound
    cannot be read to its end.
    """
    packets = packets_with_data(source.demux(*(source.streams[one] for one in indices)))
    if plan.picture >= 0:
        packets = readable_packets(packets)
    try:
        yield from packets
    except load_av().error.FFmpegError as error:
        raise InputError(f"{plan.source}: sound cannot be read ({error})") from error


def _first_packet(
    plan: OutputStreamsPlan, index: int, window: TimeMapping | None = None
) -> Any | None:
    """First packet of a stream of the source, in a window."""
    assert plan.source is not None
    with open_media_file(plan.source) as again:
        packets = read_streams(plan, again, [index])
        return next((one for one in packets if window is None or window.has(one)), None)


class CarriedStream:
    """A stream of sound, subtitles or a cover on its way to an output that has no header yet.

    Args:
        plan: The plan of the source.
        planned: What becomes of the stream.
        stream: The stream, of the opened source.
        output: The output, in which its stream is made.
        window: How times of the source become times of the output.

    Attributes:
        written: What was written of it.
        converter: What makes other packets of its packets, or None.
    """

    def __init__(
        self,
        plan: OutputStreamsPlan,
        planned: PlannedStream,
        stream: Any,
        output: Any,
        window: TimeMapping,
    ) -> None:
        self.converter: SubtitleConverter | SoundEncoder | None = None
        self._planned, self._window, self._count = planned, window, 0
        self._clock: SampleClock | None = None
        sound = stream.codec_context
        if planned.encoding is not None:
            self.converter = SoundEncoder(stream, output, planned.encoding, window)
            self._made = self.converter.made
        elif planned.into:
            self.converter = SubtitleConverter(stream, output, planned.into)
            self._made = self.converter.made
        elif planned.kind == "audio" and window.before:
            self._made = self._add_hidden(plan, stream, output)
        else:
            self._made = add_copy(output, stream)
            if planned.kind == "audio" and plan.container in ("mp4", "mov"):
                self._clock = SampleClock(sound.sample_rate, sound.frame_size)
        self._made.metadata.update(copied_metadata(stream.metadata, plan.container))
        self._made.disposition = int(stream.disposition)
        # Sound in frames of its own loses their headers in a file that has one for all.
        framed = planned.action == "copied" and planned.codec == "aac" and not sound.extradata
        self.written = StreamTally(planned.kind, whole=not framed)

    def packets(self, packet: Any) -> Iterator[Any]:
        """Packets for the output that are known with this one of the source."""
        place, self._count = self._count, self._count + 1
        if place in self._planned.left_out or not self._is_kept(packet):
            return
        if self._clock is not None:
            self._clock.set(packet)
        converter = self.converter
        yield from self._placed(iter([packet]) if converter is None else converter.convert(packet))

    def try_packet(self, packet: Any, output: Any) -> None:
        """Do with a packet all that can fail, without encoding its sound.

        Raises FFmpeg's error, or `ValueError`, where its output refuses it.
        """
        if isinstance(self.converter, SoundEncoder):
            for _ in self.converter.heard(packet):
                pass
            return
        for made in self.packets(packet):
            output.mux_one(made)

    def flush(self) -> Iterator[Any]:
        """Packets that were still waiting at the end."""
        if self.converter is not None:
            yield from self._placed(self.converter.flush())

    def _add_hidden(self, plan: OutputStreamsPlan, stream: Any, output: Any) -> Any:
        """Make a stream of sound in Matroska, which hides what is before 0 by a delay."""
        if self._planned.codec == "opus":  # whose header has a delay that decoders go by
            samples = int.from_bytes((stream.codec_context.extradata or b"")[10:12], "little")
            delay = Fraction(samples, _OPUS_RATE) + stream.time_base  # stamps are rounded
            self._window = replace(self._window, before=delay)
        first = _first_packet(plan, stream.index, self._window)
        own = self._planned.codec == "opus" or "matroska" in stream.container.format.name
        hidden = Fraction(0) if first is None else -self._window.shift - packet_time(first)
        if own or hidden < _LEAST_HIDDEN:
            return add_copy(output, stream)
        return add_delayed_copy(output, stream, first, hidden)

    def _is_kept(self, packet: Any) -> bool:
        """Whether a packet belongs to the output, to whose part it may be clipped."""
        if self._planned.kind == "cover" or self._planned.encoding is not None:
            return True
        if packet.is_discard and packet_time(packet) + self._window.shift >= 0:
            return False  # an edit list hides it; what is before 0 is hidden anyway
        if self._planned.kind == "subtitle":
            return not is_pause(packet) and self._window.clip(packet)
        return self._window.has(packet)

    def _placed(self, packets: Iterator[Any]) -> Iterator[Any]:
        for packet in packets:
            packet.stream = self._made
            if self._planned.kind == "cover":
                packet.pts = packet.dts = 0
            else:
                self._window.move(packet)
            self.written.require_rising(packet)
            self.written.add(packet)
            yield packet


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


def is_pause(packet: Any) -> bool:
    """Whether a packet of subtitles is MP4's for a time without text: muxers write their own."""
    return bytes(packet) == b"\0\0"


@dataclass(frozen=True)
class SubtitleCue:
    """Text shown from stamp ``begin`` to before ``end``, with ASS's marks of style."""

    begin: int
    end: int
    text: str


class CueTimeline:
    """Cues made to follow each other: those shown together become one of several lines.

    MP4 shows one text at a time, and would end a cue where the next one begins.
    """

    def __init__(self) -> None:
        self._shown: list[SubtitleCue] = []
        self._at = 0

    def add(self, cue: SubtitleCue) -> Iterator[SubtitleCue]:
        """Cues that end by the beginning of ``cue``, which begins no earlier than the last one."""
        yield from self.flush(cue.begin)
        self._shown.append(cue)
        self._at = cue.begin

    def flush(self, limit: int | None = None) -> Iterator[SubtitleCue]:
        """Cues up to stamp ``limit``, or all."""
        while self._shown and (limit is None or self._at < limit):
            ends = [cue.end for cue in self._shown]
            stop = min(ends if limit is None else [*ends, limit])
            if stop > self._at:
                yield SubtitleCue(self._at, stop, "\\N".join(cue.text for cue in self._shown))
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
        cue = SubtitleCue(packet.pts, packet.pts + (packet.duration or 0), "\\N".join(lines))
        cues = [cue] if self._timeline is None else self._timeline.add(cue)
        yield from map(self._packet, cues)

    def flush(self) -> Iterator[Any]:
        """Packets of the texts that were still shown at the end."""
        if self._timeline is not None:
            yield from map(self._packet, self._timeline.flush())

    def _packet(self, cue: SubtitleCue) -> Any:
        from av.subtitles.subtitle import SubtitleSet

        event = f"0,0,Default,,0,0,0,,{cue.text}".encode()
        subtitle = SubtitleSet.create(event, 0, 0)
        packet = self.made.codec_context.encode_subtitle(subtitle)
        packet.stream, packet.time_base = self.made, self._time_base
        packet.pts = packet.dts = cue.begin
        packet.duration = cue.end - cue.begin
        packet.is_keyframe = True
        return packet
