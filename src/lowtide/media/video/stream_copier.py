"""Carrying a source's sound, subtitles, attachments, cover and chapters to an output.

Packets are copied. Sound that the container does not hold is encoded, and subtitles are converted
from the form of one container to that of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from lowtide.core.errors import InputError
from lowtide.media.video.codec_delay import add_delayed_copy
from lowtide.media.video.opened_video import load_av, open_source, packets_with_data, readable
from lowtide.media.video.other_streams import (
    PlannedStream,
    StreamPlan,
    copied_metadata,
    cover_file,
    file_metadata,
)
from lowtide.media.video.packet_times import SampleClock, TimeWindow, WrittenStream, packet_time
from lowtide.media.video.sound_encoder import SoundEncoder
from lowtide.media.video.subtitle_converter import SubtitleConverter, is_pause
from lowtide.media.video.video_containers import add_copy

_OPUS_RATE = 48_000  # a second, of the samples that the header of Opus says to leave out
_LEAST_HIDDEN = Fraction(1, 1000)  # seconds, a tick of Matroska


class StreamCopier:
    """Copier of all streams of a plan but the picture.

    Args:
        plan: What becomes of the streams.
        window: How times of the source become times of the output.
        source: The opened source.

    Attributes:
        carried: The streams that have packets, by their index in the source.
    """

    def __init__(self, plan: StreamPlan, window: TimeWindow, source: Any) -> None:
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


def read_streams(plan: StreamPlan, source: Any, indices: list[int]) -> Iterator[Any]:
    """Packets of some streams of an opened source.

    A video is read as far as that is possible. Raises `InputError` where another file of sound
    cannot be read to its end.
    """
    packets = packets_with_data(source.demux(*(source.streams[one] for one in indices)))
    if plan.picture >= 0:
        packets = readable(packets)
    try:
        yield from packets
    except load_av().error.FFmpegError as error:
        raise InputError(f"{plan.source}: sound cannot be read ({error})") from error


def _first_packet(plan: StreamPlan, index: int, window: TimeWindow | None = None) -> Any | None:
    """First packet of a stream of the source, in a window."""
    assert plan.source is not None
    with open_source(plan.source) as again:
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
        self, plan: StreamPlan, planned: PlannedStream, stream: Any, output: Any, window: TimeWindow
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
        self.written = WrittenStream(planned.kind, whole=not framed)

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

    def _add_hidden(self, plan: StreamPlan, stream: Any, output: Any) -> Any:
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
