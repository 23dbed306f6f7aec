"""Times of packets: moved together, cut to a part of the file, and kept in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Any

import numpy as np

# Seconds between packets of sound: more than a tick of any output, to which stamps are rounded.
_APART = Fraction(1, 4000)


@dataclass(frozen=True)
class TimeMapping:
    """How times of a source become times of the output.

    Attributes:
        shift: Seconds added to every time.
        first: Beginning of the part that is kept, in seconds of the source; None for all of it.
        last: Its end, or None.
        before: Seconds before ``first`` from which sound is kept: decoders begin with it, and
            players leave it out.
    """

    shift: Fraction = Fraction(0)
    first: Fraction | None = None
    last: Fraction | None = None
    before: Fraction = Fraction(0)

    def move(self, packet: Any) -> None:
        """Add the shift to a packet's stamps, exactly: in finer units where they ask for it."""
        base = packet.time_base
        if not self.shift:
            return
        fine = Fraction(1, lcm(base.denominator, self.shift.denominator))
        times, more = int(base / fine), int(self.shift / fine)
        for name in ("pts", "dts"):
            stamp = getattr(packet, name)
            setattr(packet, name, None if stamp is None else stamp * times + more)
        packet.duration = (packet.duration or 0) * times
        packet.time_base = fine

    def has(self, packet: Any) -> bool:
        """Whether a packet begins in the window."""
        begin = packet_time(packet)
        early = self.first is not None and begin < self.first - self.before
        return not early and (self.last is None or begin < self.last)

    def clip(self, packet: Any) -> bool:
        """Cut a packet's time of display to the window; return whether any of it is inside."""
        base, begin = packet.time_base, packet_time(packet)
        inside = self._inside(begin, begin + (packet.duration or 0) * base)
        if inside is None:
            return False
        if self.first is not None:
            packet.pts = packet.dts = round(inside[0] / base)
            packet.duration = round((inside[1] - inside[0]) / base)
        return True

    def chapters(self, chapters: list[Any]) -> list[Any]:
        """Chapters of the window, moved."""
        moved = []
        for chapter in chapters:
            inside = self._inside(
                *(chapter[key] * chapter["time_base"] for key in ("start", "end"))
            )
            if inside is None:
                continue
            base = Fraction(1, lcm(chapter["time_base"].denominator, self.shift.denominator))
            begin, end = (int((time + self.shift) / base) for time in inside)
            moved.append(chapter | {"start": begin, "end": end, "time_base": base})
        return moved

    def _inside(self, begin: Fraction, end: Fraction) -> tuple[Fraction, Fraction] | None:
        """The part of a time that is in the window; None if there is none."""
        first, last = self.first, self.last
        if first is not None:
            if end <= first and begin < first:
                return None
            begin, end = max(begin, first), max(end, first)
        if last is not None:
            if begin >= last:
                return None
            end = min(end, last)
        return begin, end


@dataclass
class StreamTally:
    """What was written or read of a stream.

    Attributes:
        kind: As in `PlannedStream`.
        whole: Whether packets keep all their bytes.
        begin: Time of its first packet in seconds; 0 without packets.
        packets: How many packets.
        size: Bytes in all of them.
        corrected: Packets whose stamps were moved up, so that they rise.
    """

    kind: str
    whole: bool = True
    begin: Fraction = Fraction(0)
    packets: int = 0
    size: int = 0
    corrected: int = 0
    _last: Fraction | None = None

    def add(self, packet: Any) -> None:
        """Count a packet."""
        if not self.packets:
            self.begin = packet_time(packet)
        self.packets += 1
        self.size += packet.size

    def require_rising(self, packet: Any) -> None:
        """Give a packet the stamps it lacks, and move them up where they go back in time.

        Every container asks for decoding stamps that rise.
        """
        if packet.pts is None:
            packet.pts = packet.dts
        if packet.dts is None:
            packet.dts = packet.pts
        if packet.dts is None:
            return
        base = packet.time_base
        # Several lines may begin at one time.
        step = Fraction(0) if self.kind == "subtitle" else max(base, _APART)
        if self._last is not None and packet.dts * base < self._last + step:
            packet.dts = ceil((self._last + step) / base)
            packet.pts = max(packet.pts, packet.dts)
            self.corrected += 1
        self._last = packet.dts * base


class SampleClock:
    """Stamps of sound in samples, which a container with a coarser clock has rounded.

    A frame begins where the one before ended, if its rounded stamp does not contradict that.

    Args:
        rate: Samples a second.
        samples: Samples in a frame, or 0 if that varies.
    """

    def __init__(self, rate: int, samples: int) -> None:
        self._tick, self._samples = Fraction(1, rate), samples
        self._due: int | None = None

    def set(self, packet: Any) -> None:
        """Give a packet its stamps in samples."""
        base = packet.time_base
        if not self._samples or packet.pts is None or base <= self._tick:
            return
        begin = packet.pts * base
        if self._due is None or abs(begin - self._due * self._tick) > base:
            self._due = round(begin / self._tick)
        packet.time_base = self._tick
        packet.pts = packet.dts = self._due
        packet.duration = self._samples
        self._due += self._samples


def packet_time(packet: Any) -> Fraction:
    """Seconds at which a packet is shown or heard."""
    stamp = packet.pts if packet.pts is not None else packet.dts
    return (stamp or 0) * packet.time_base


def merge_packets(*streams: Iterator[Any]) -> Iterator[Any]:
    """Packets of all, the one decoded earlier first: muxers hold those that wait in memory."""
    return heapq.merge(*streams, key=_decoded)


def _decoded(packet: Any) -> Fraction:
    return packet.dts * packet.time_base if packet.dts is not None else packet_time(packet)


def frame_rate(stamps: np.ndarray, time_base: Fraction, stated: Fraction | None) -> Fraction:
    """Frames a second where all stamps (N,) keep one rate to a tick of theirs, else 0.

    It is what the source has ``stated``, which may be wrong, or else the mean of the stamps.
    """
    if len(stamps) < 2:
        return Fraction(0)
    mean = (len(stamps) - 1) / (int(stamps[-1] - stamps[0]) * time_base)
    for rate in (stated or mean, mean):
        due = np.arange(len(stamps)) * float(1 / (rate * time_base))
        if np.abs(stamps - stamps[0] - due).max() <= 1:
            return rate
    return Fraction(0)
