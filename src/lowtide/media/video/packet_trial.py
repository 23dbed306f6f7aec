"""Packets tried before work starts, so that no output fails by them after hours."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from typing import Any

from lowtide.media.video.opened_video import damaged_error, load_av, open_source
from lowtide.media.video.other_streams import PlannedStream, StreamPlan
from lowtide.media.video.packet_times import TimeWindow, packet_time
from lowtide.media.video.stream_copier import CarriedStream, read_streams
from lowtide.media.video.video_containers import muxer_options


def tried_streams(plan: StreamPlan, *, keep_damaged: bool) -> StreamPlan:
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
def _tried(plan: StreamPlan, keep_damaged: bool, _changed: int, _size: int) -> StreamPlan:
    trials: dict[int, _PacketTrial] = {}
    assert plan.source is not None
    with open_source(plan.source) as source:
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

    def __init__(self, plan: StreamPlan, planned: PlannedStream, stream: Any) -> None:
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
            self._carried = CarriedStream(plan, planned, stream, self._output, TimeWindow())
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
