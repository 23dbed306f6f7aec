"""Joining segments and the source's other streams into one file, which is then read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.atomic_file import write_error
from lowtide.core.errors import OutputError
from lowtide.media.video.opened_video import (
    ffmpeg_name,
    find_picture,
    load_av,
    open_media_file,
    packets_with_data,
)
from lowtide.media.video.other_streams import OutputStreamsPlan, picture_metadata
from lowtide.media.video.packet_times import (
    StreamTally,
    TimeMapping,
    frame_rate,
    merge_packets,
)
from lowtide.media.video.stream_copier import StreamCopier, is_pause
from lowtide.media.video.video_containers import muxer_options
from lowtide.media.video.video_encoder import picture_packets, segment_packet_order
from lowtide.media.video.video_facts import display_matrix

# MP4 says in ticks of the whole file when a stream begins; more a second than this are refused by
# some players.
_FINEST_TICKS = 10_000_000
# Sound before 0 that decoders begin with: Opus takes 0.08 s until it is right, the most of all.
_BEFORE = Fraction(1, 10)
# Times are compared as floats of seconds: a billionth is less than any file's tick.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class JoinedFile:
    """A file that `join_segments` wrote, as `verify_output_frames` reads it again.

    Attributes:
        path: The file.
        stamps: Stamps of its frames (N,), int64, of ``time_base``.
        time_base: Seconds of one stamp.
        shift: Seconds by which the output's times are later than the stamps.
        streams: Other streams, in the order in which they were made.
        notes: What was not as it should have been.
    """

    path: Path
    stamps: np.ndarray
    time_base: Fraction
    shift: Fraction = Fraction(0)
    streams: tuple[StreamTally, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputPictureStream:
    """The picture stream of an output.

    Attributes:
        segments: Files of encoded frames.
        stamps: Their stamps (N,), int64, of ``time_base``.
        time_base: Seconds of one stamp.
        last_duration: Stamps that the last frame is shown for, or None if unknown.
        pixel_aspect: Width of a pixel by its height, or None if unknown.
        rotation: Degrees counterclockwise that a player turns it by.
        mirrored: Whether players mirror it.
    """

    segments: Sequence[Path]
    stamps: np.ndarray
    time_base: Fraction
    last_duration: int | None
    pixel_aspect: Fraction | None
    rotation: int
    mirrored: bool

    @property
    def durations(self) -> np.ndarray:
        """Stamps that each frame is shown for (N,)."""
        gaps = np.diff(self.stamps)
        last = self.last_duration or (int(gaps[-1]) if len(gaps) else 1)
        return np.append(gaps, last)


def join_segments(
    plan: OutputStreamsPlan,
    segments: Sequence[Path],
    target: Path,
    *,
    stamps: np.ndarray,
    time_base: Fraction,
    last_duration: int | None = None,
    pixel_aspect: Fraction | None = None,
    rotation: int = 0,
    mirrored: bool = False,
    cut: bool = False,
    after_frame: Callable[[], object] | None = None,
) -> JoinedFile:
    """One file of the segments' pictures and the source's other streams.

    Args:
        plan: What becomes of the source's streams.
        segments: Files of encoded frames, in order.
        target: File to write, replaced if it exists; its format is the plan's.
        stamps: Presentation stamps of all frames (N,), int64, rising, of the source's clock.
        time_base: Seconds of one stamp.
        last_duration: Stamps that the last frame is shown for; default, as long as the one before.
        pixel_aspect: Width of a pixel by its height.
        rotation: Degrees counterclockwise that a player turns the picture by.
        mirrored: Whether players mirror it, by `is_mirrored`.
        cut: Whether the frames are a part of the source: the other streams are cut to its time, and
            the part begins at 0.
        after_frame: Called after each frame, to show progress or to raise an error that stops the
            work.

    Raises:
        OutputError: The file cannot be written, or the segments hold another number of frames. No
            file is left.
        InputError: The source's other streams cannot be read to their end.
    """
    av = load_av()
    picture = OutputPictureStream(
        segments, stamps, time_base, last_duration, pixel_aspect, rotation, mirrored
    )
    try:
        return _Muxer(plan, picture, cut).write(target, after_frame)
    except (OSError, ValueError, av.error.FFmpegError) as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise write_error(target, error) from error
        raise OutputError(f"{target}: cannot be written ({error})") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


class _Muxer:
    """One output while it is written."""

    def __init__(self, plan: OutputStreamsPlan, picture: OutputPictureStream, cut: bool) -> None:
        self.plan, self.picture, self.cut = plan, picture, cut
        self.window = _window(plan, picture, cut)

    def write(self, target: Path, after_frame: Callable[[], object] | None) -> JoinedFile:
        av, picture, plan = load_av(), self.picture, self.plan
        order = segment_packet_order(picture.segments, len(picture.stamps))
        with ExitStack() as stack:
            sources = [
                (part, window, stack.enter_context(open_media_file(part.source)))
                for part, window in self._parts()
                if part.source
            ]
            source = sources[0][2] if plan.source else None
            first = stack.enter_context(open_media_file(picture.segments[0]))
            options = muxer_options(plan.container, self._ticks(sources))
            output = stack.enter_context(
                av.open(ffmpeg_name(target), "w", format=plan.container, container_options=options)
            )
            shown = self._add_picture(output, first.streams.video[0], source)
            packets = picture_packets(
                picture.segments, order, picture.stamps, picture.durations, picture.time_base
            )
            copiers = [StreamCopier(*part) for part in sources]
            for copier in copiers:
                copier.add(output)
            others = [copier.packets() for copier in copiers]
            for packet in merge_packets(self._placed(packets, shown, after_frame), *others):
                output.mux_one(packet)
        return JoinedFile(
            target,
            picture.stamps,
            picture.time_base,
            self.window.shift,
            tuple(one.written for copier in copiers for one in copier.carried.values()),
            tuple(note for copier in copiers for note in copier.notes()),
        )

    def _parts(self) -> list[tuple[OutputStreamsPlan, TimeMapping]]:
        """The source, and the file of the sound with its own times."""
        plan, window, other = self.plan, self.window, self.plan.sound
        if other is None:
            return [(plan, window)]
        later = other.begin - plan.begin
        ends = {"first": window.first, "last": window.last}
        ends = {name: end + later for name, end in ends.items() if end is not None}
        moved = replace(window, shift=window.shift - later, **ends)
        return [(plan, window), (other, moved)]

    def _placed(
        self, packets: Iterator[Any], shown: Any, after_frame: Callable[[], object] | None
    ) -> Iterator[Any]:
        for packet in packets:
            packet.stream = shown
            self.window.move(packet)
            yield packet
            if after_frame:
                after_frame()

    def _ticks(self, sources: list[tuple[OutputStreamsPlan, TimeMapping, Any]]) -> int:
        """Ticks a second in which the beginning of every stream is a whole number."""
        bases = [self.picture.time_base]
        for plan, window, source in sources:
            bases += [window.shift, *(source.streams[one.index].time_base for one in plan.kept)]
            bases += [Fraction(1, one.encoding.rate) for one in plan.kept if one.encoding]
        ticks = lcm(*(base.denominator for base in bases if base is not None))
        return ticks if ticks <= _FINEST_TICKS else self.picture.time_base.denominator

    def _add_picture(self, output: Any, template: Any, source: Any | None) -> Any:
        picture = self.picture
        shown = output.add_stream_from_template(template, opaque=True)
        shown.time_base = picture.time_base
        if template.codec_context.name == "hevc" and self.plan.container in ("mp4", "mov"):
            shown.codec_context.codec_tag = "hvc1"  # Apple's players know no other
        old = source.streams[self.plan.picture] if source else None
        rate = frame_rate(picture.stamps, picture.time_base, old and old.average_rate)
        shown.codec_context.framerate = rate
        if old:
            timecode = bool(rate) and not self.cut
            shown.metadata.update(picture_metadata(old.metadata, self.plan.container, timecode))
            shown.disposition = int(old.disposition)
        if picture.pixel_aspect:
            shown.codec_context.sample_aspect_ratio = picture.pixel_aspect
        if picture.rotation or picture.mirrored:
            shown.set_display_matrix(display_matrix(picture.rotation, picture.mirrored))
        return shown


def _window(plan: OutputStreamsPlan, picture: OutputPictureStream, cut: bool) -> TimeMapping:
    begin = int(picture.stamps[0]) * picture.time_base
    if not cut:
        # No picture is shown before 0: players leave such frames out.
        shift = max(-plan.begin, -begin)
        if plan.container in ("matroska", "webm"):  # whose files have no edit list that hides it
            return TimeMapping(shift, first=-shift, before=_BEFORE)
        return TimeMapping(shift)
    end = (int(picture.stamps[-1]) + int(picture.durations[-1])) * picture.time_base
    return TimeMapping(-begin, begin, end)


def verify_output_frames(
    joined: JoinedFile, *, after_frame: Callable[[], object] | None = None
) -> None:
    """Decode every frame of a written file and compare count and times with what was due.

    Sound and subtitles are compared by where they begin, sound by its bytes too.

    Args:
        joined: What `join_segments` wrote.
        after_frame: Called after each frame, to show progress or to raise an error that stops the
            work.

    Raises:
        OutputError: A frame is missing or one too many, cannot be decoded, or lies more than one
            tick of the output's clock from its time; sound or subtitles are missing or begin
            elsewhere.
    """
    av = load_av()
    with open_media_file(joined.path) as opened:
        shown: Any = opened.streams[find_picture(opened, joined.path)]
        others: list[Any] = [*opened.streams.audio, *opened.streams.subtitles]
        found = {stream.index: StreamTally(stream.type) for stream in others}
        stamps: list[int | None] = []
        try:
            for packet in packets_with_data(opened.demux(shown, *others)):
                if packet.stream_index == shown.index:
                    stamps += [frame.pts for frame in shown.decode(packet)]
                    if after_frame:
                        after_frame()
                elif not is_pause(packet):
                    found[packet.stream_index].add(packet)
            stamps += [frame.pts for frame in shown.decode(None)]
        except av.error.FFmpegError as error:
            raise OutputError(
                f"{joined.path}: what was written cannot be read ({error})"
            ) from error
        _compare_frames(joined, stamps, shown.time_base)
        for kind in ("audio", "subtitle"):
            due = [stream for stream in joined.streams if stream.kind == kind and stream.packets]
            read = [(found[s.index], s.time_base) for s in others if s.type == kind]
            _compare_streams(joined.path, kind, due, [pair for pair in read if pair[0].packets])


def _compare_frames(joined: JoinedFile, stamps: list[int | None], tick: Fraction) -> None:
    if len(stamps) != len(joined.stamps) or None in stamps:
        raise OutputError(
            f"{joined.path}: {len(joined.stamps)} frames were written, and"
            f" {len(stamps) - stamps.count(None)} with a time were read again"
        )
    due = joined.stamps * float(joined.time_base) + float(joined.shift)
    late = np.abs(np.array(stamps, np.float64) * float(tick) - due)
    if late.max() > float(tick) + _ROUNDING:
        worst = int(late.argmax())
        raise OutputError(
            f"{joined.path}: frame {worst} was due at {due[worst]:.6f} s and lies"
            f" {late[worst]:.6f} s from there (a tick of the file is {float(tick):.6f} s)"
        )


def _compare_streams(
    path: Path, kind: str, due: list[StreamTally], read: list[tuple[StreamTally, Fraction]]
) -> None:
    if len(due) != len(read):
        raise OutputError(f"{path}: {len(due)} {kind} streams were written, {len(read)} read again")
    for place, (written, (again, tick)) in enumerate(zip(due, read, strict=True)):
        name = f"{path}: {kind} stream {place}"
        if abs(written.begin - again.begin) > tick:
            raise OutputError(
                f"{name} was due at {float(written.begin):.6f} s and begins at"
                f" {float(again.begin):.6f} s"
            )
        if kind == "audio" and written.whole and written.size != again.size:
            raise OutputError(
                f"{name}: {written.size} bytes were written and {again.size} read again"
            )
