"""Copying a source's sound, subtitles, attachments, cover and chapters to an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.core.errors import InputError
from lowtide.media.video.opened_video import open_source, packets_with_data
from lowtide.media.video.other_streams import PlannedStream, StreamPlan, cover_file
from lowtide.media.video.packet_times import SampleClock, TimeWindow, WrittenStream
from lowtide.media.video.pyav import load_av
from lowtide.media.video.stream_metadata import copied_metadata, file_metadata
from lowtide.media.video.subtitle_text import SubtitleConverter, is_pause


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
