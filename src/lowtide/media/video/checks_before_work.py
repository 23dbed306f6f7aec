"""Checks before work starts, so that no output fails after hours: one format, and packets tried."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import (
    damaged_error,
    load_av,
    open_media_file,
    open_video,
    packets_with_data,
    readable_packets,
)
from lowtide.media.video.other_streams import OutputStreamsPlan, PlannedStream
from lowtide.media.video.packet_times import TimeMapping, packet_time
from lowtide.media.video.stream_copier import CarriedStream, read_streams
from lowtide.media.video.video_containers import muxer_options
from lowtide.media.video.video_facts import VideoFacts

# Pixels that are decoded at most, some seconds of work: 480 frames of 1080p.
_PIXELS = 10**9


def tried_streams(plan: OutputStreamsPlan, *, keep_damaged: bool) -> OutputStreamsPlan:
    """The plan after all packets of its streams were written to nowhere, or decoded.

    Args:
        plan: What becomes of the streams.
        keep_damaged: Leave out packets that cannot be written, and streams without any other;
            their reasons say so.

    Raises:
        VideoError: A packet cannot be written, or its sound cannot be decoded.
        InputError: The source cannot be read to its end.
    """
    if plan.sound is not None:
        sound = tried_streams(plan.sound, keep_damaged=keep_damaged)
        plan = replace(plan, sound=sound, notes=plan.notes + sound.notes)
    if plan.source is None:
        return plan
    status = plan.source.stat()
    return _tried(plan, keep_damaged, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)  # asked for before a model is loaded, and after
def _tried(
    plan: OutputStreamsPlan, keep_damaged: bool, _changed: int, _size: int
) -> OutputStreamsPlan:
    trials: dict[int, _PacketTrial] = {}
    assert plan.source is not None
    with open_media_file(plan.source) as source:
        for planned in plan.kept:
            if planned.kind not in ("attachment", "cover"):
                trials[planned.index] = _PacketTrial(plan, planned, source.streams[planned.index])
        if not trials:
            return plan
        for packet in read_streams(plan, source, list(trials)):
            trials[packet.stream_index].add(packet)
    for trial in trials.values():
        trial.close()
        if trial.failures and not keep_damaged:
            raise damaged_error(plan.source, trial.failures[0])
    streams = [trials[one.index].result() if one.index in trials else one for one in plan.streams]
    notes = [trial.note for trial in trials.values() if trial.failures]
    return replace(plan, streams=tuple(streams), notes=(*plan.notes, *notes))


class _Nowhere(io.RawIOBase):
    """File that forgets what is written to it."""

    def __init__(self) -> None:
        self._place = self._end = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._place += len(data)
        self._end = max(self._end, self._place)
        return len(data)

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._end)[whence]
        return self._place


class _PacketTrial:
    """Trial of the packets of one stream, in an output of its own."""

    def __init__(self, plan: OutputStreamsPlan, planned: PlannedStream, stream: Any) -> None:
        options = muxer_options(plan.container)
        self.failures: list[str] = []
        self._planned, self._count, self._bad = planned, 0, list[int]()
        self._kind = f"{planned.kind} {planned.index}"
        self._errors = (load_av().error.FFmpegError, ValueError)
        self._output = load_av().open(
            _Nowhere(), "w", format=plan.container, container_options=options
        )
        self._carried: CarriedStream | None = None
        try:
            self._carried = CarriedStream(plan, planned, stream, self._output, TimeMapping())
        except self._errors as error:
            self.failures.append(f"{self._kind} cannot be read ({_reason(error)})")

    def add(self, packet: Any) -> None:
        """Try a packet."""
        place, self._count = self._count, self._count + 1
        damaged = self._damaged
        if self._carried is None:
            self._bad.append(place)
            return
        try:
            self._carried.try_packet(packet, self._output)
        except self._errors as error:
            self._fail(place, packet, f"cannot be written ({_reason(error)})")
        if self._damaged > damaged:
            self._fail(place, packet, "cannot be decoded")

    def close(self) -> None:
        """End the output; its end may be what fails."""
        try:
            if self._carried is not None and self._planned.encoding is None:
                for packet in self._carried.flush():
                    self._output.mux_one(packet)
            self._output.close()
        except self._errors as error:
            self.failures.append(f"{self._kind} cannot be written ({_reason(error)})")
            self._bad = list(range(self._count))

    @property
    def note(self) -> str:
        """What is left out."""
        if len(self._bad) == self._count:
            return f"{self._kind} is damaged and left out"
        bad = f"{len(self._bad):,} of {self._count:,} packets"
        return f"{bad} of {self._kind} are damaged and left out"

    def result(self) -> PlannedStream:
        """What becomes of the stream."""
        planned = self._planned
        if not self.failures:
            return planned
        if len(self._bad) == self._count:
            return replace(planned, action="dropped", into="", encoding=None, reason="damaged")
        reason = "; ".join(filter(None, (planned.reason, self.note)))
        # A decoder gets all packets, as in the trial, and makes silence of the damaged ones.
        places = frozenset[int]() if planned.encoding is not None else frozenset(self._bad)
        return replace(planned, reason=reason, left_out=places)

    @property
    def _damaged(self) -> int:
        return getattr(self._carried and self._carried.converter, "damaged", 0)

    def _fail(self, place: int, packet: Any, what: str) -> None:
        self._bad.append(place)
        seconds = float(packet_time(packet))
        self.failures.append(f"{self._kind}: its packet at {seconds:.2f} s {what}")


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


@functools.lru_cache(maxsize=16)  # asked for before a model is loaded, and after
def require_one_format(facts: VideoFacts, first: int, last: int, keep_damaged: bool) -> None:
    """Look at the key frames of ``first`` to before ``last``, between which formats do not change.

    In a long file there is a distance between those that are looked at.

    Raises:
        VideoError: One has another size or format than those before, or cannot be decoded, unless
            damage is kept.
    """
    begin, end = int(facts.stamps[first]), int(facts.stamps[last - 1])
    distance = ceil((last - first) * facts.format.width * facts.format.height / _PIXELS)
    change = _first_change(facts, (begin, end), distance, keep_damaged)
    if change is not None and distance > 1:
        change = _first_change(facts, change[:2], 1, keep_damaged) or change
    if change is None:
        return
    _, stamp, before, after = change
    index = int(np.searchsorted(facts.stamps, stamp))
    raise VideoError(
        f"{facts.path}: from frame {index:,} on, at {float(stamp * facts.time_base):.2f} s, frames"
        f" are {after} instead of {before}",
        hint=f"--frames A:{index}, and --frames {index}:B in another run",
    )


def _first_change(
    facts: VideoFacts, span: tuple[int, int], distance: int, keep_damaged: bool
) -> tuple[int, int, str, str] | None:
    """Stamps of the key frames before and after the first change in a span, and their formats."""
    before: tuple[int, str] | None = None
    for stamp, format in _key_frames(facts, span, distance, keep_damaged):
        if before is not None and before[1] != format:
            return before[0], stamp, before[1], format
        before = stamp, format
    return None


def _key_frames(
    facts: VideoFacts, span: tuple[int, int], distance: int, keep_damaged: bool
) -> Iterator[tuple[int, str]]:
    """Stamps and formats of the key frame that a span begins with, and of those within it."""
    begin, end = span
    waiting, count = None, 0
    with open_video(facts.path) as (container, stream):
        for packet in packets_with_data(readable_packets(container.demux(stream))):
            count += 1
            if packet.pts is None or not packet.is_keyframe or packet.pts > end:
                continue
            if packet.pts <= begin:
                waiting = packet
                continue
            if waiting is not None:
                yield from _decoded(facts, stream, waiting, keep_damaged)
                waiting = None
            elif count < distance:
                continue
            yield from _decoded(facts, stream, packet, keep_damaged)
            count = 0


def _decoded(
    facts: VideoFacts, stream: Any, packet: Any, keep_damaged: bool
) -> Iterator[tuple[int, str]]:
    decoder = stream.codec_context
    stamp = packet.pts
    try:
        frames = [*decoder.decode(packet), *decoder.decode(None)]
        decoder.flush_buffers()
    except load_av().error.FFmpegError as error:
        decoder.flush_buffers()
        if not keep_damaged:
            raise damaged_error(
                facts.path,
                f"the frame of {float(stamp * facts.time_base):.2f} s cannot be decoded"
                f" ({error.strerror})",
            ) from error
        return
    for frame in frames[:1]:
        yield stamp, f"{frame.width}×{frame.height} {frame.format.name}"
