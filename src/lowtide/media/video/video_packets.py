"""Packets of a video file: the stamp of every frame, and how far the file goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import (
    load_av,
    open_video,
    packets_with_data,
    readable_packets,
)

# Streams may end a little before the duration in a header: a cut file ends earlier.
_END_SECONDS = Fraction(1, 2)
# Seconds of the longest gap between frames: less and more are errors of the stamps, which neither
# encoders nor MP4 can hold.
_LEAST_GAP, _LONGEST_GAP = 1e-6, 6 * 3600
# AVI stamps frames in the order in which they are stored, which is not always that of display.
_STORED_ORDER = "avi"


@dataclass
class VideoPackets:
    """What the packets of a file say: stamps of frames, and when its last stream ends."""

    time_base: Fraction
    stamps: list[int] = field(default_factory=list)
    missing: int = 0
    hidden: int = 0
    last_duration: int = 0
    end: Fraction = Fraction(0)
    header_end: Fraction = Fraction(0)
    ordered: bool = True
    broken: str = ""

    @property
    def notes(self) -> list[str]:
        """Frames that players do not show, and those that are not there."""
        said = [] if self.damage is None else [f"the file is damaged: {self.damage}"]
        if self.hidden:
            said.append(
                f"{self.hidden} frames before the first one are hidden, as the file's edit list"
                " says"
            )
        return said

    @property
    def damage(self) -> str | None:
        """What a file is called that ends before its header says, or cannot be read to its end."""
        if self.broken:
            return self.broken
        if self.header_end - self.end <= _END_SECONDS:
            return None
        said = f"{float(self.header_end):.2f} s"
        return f"it ends after {float(self.end):.2f} s, and its header says {said}"

    def add(self, packet: Any, pictures: bool) -> None:
        stamp = packet.dts if packet.pts is None else packet.pts
        if stamp is not None:
            end = (stamp + (packet.duration or 0)) * packet.time_base
            self.end = max(self.end, end)
        if not pictures:
            return
        if packet.is_discard:
            self.hidden += 1
            return
        if packet.pts is None:
            self.missing += 1
            return
        if not self.stamps or packet.pts > max(self.stamps[-64:]):
            self.last_duration = packet.duration or 0
        self.stamps.append(packet.pts)


def read_packets(path: Path) -> VideoPackets:
    """Read all packets, or those before the first that cannot be read."""
    av = load_av()
    with open_video(path) as (container, stream):
        packets = VideoPackets(stream.time_base or Fraction(1, av.time_base))
        packets.ordered = container.format.name != _STORED_ORDER
        try:
            for packet in packets_with_data(container.demux()):
                packets.add(packet, packet.stream.index == stream.index)
        except av.error.FFmpegError as error:
            end = f"{float(packets.end):.2f} s"
            packets.broken = f"after {end} it cannot be read ({error.strerror})"
        # From 0 on; in formats that count from the first packet, it is found in the packets.
        packets.header_end = Fraction(container.duration or 0, av.time_base)
    return packets


def decode_stamps(path: Path, packets: VideoPackets) -> None:
    """Take the stamps of all frames of a file whose packets are more than its frames."""
    av, packets.stamps = load_av(), []
    with open_video(path) as (container, stream):
        for packet in readable_packets(container.demux(stream)):
            try:
                frames = packet.decode()
            except av.error.FFmpegError as error:
                count = f"after {len(packets.stamps):,} frames"
                packets.broken = f"{count} one cannot be decoded ({error.strerror})"
                continue
            packets.stamps += [frame.pts for frame in frames if frame.pts is not None]


def checked_stamps(path: Path, packets: VideoPackets) -> np.ndarray:
    """Return the stamps in order; raises `VideoError` where frames have none of their own."""
    if packets.missing:
        raise VideoError(
            f"{path}: {packets.missing} of {packets.missing + len(packets.stamps)} frames have no"
            " time stamp",
            hint=f"give it stamps: ffmpeg -fflags +genpts -r 25 -i {path} -c copy stamped.mkv",
        )
    stamps = np.array(sorted(packets.stamps), np.int64)
    if not len(stamps):
        raise VideoError(f"{path}: its stream of pictures has no frames")
    gaps = np.diff(stamps)
    hint = f"give it stamps of its own: ffmpeg -i {path} -fps_mode cfr stamped.mkv"
    equal = np.flatnonzero(gaps == 0)
    if len(equal):
        place = int(equal[0])
        seconds = float(int(stamps[place]) * packets.time_base)
        raise VideoError(
            f"{path}: frames {place} and {place + 1} have the same time stamp, {seconds:.3f} s"
            f" ({len(equal)} such frames)",
            hint=hint,
        )
    if len(gaps):
        place, tick = int(gaps.argmax()), float(packets.time_base)
        if not _LEAST_GAP < gaps[place] * tick < _LONGEST_GAP:
            raise VideoError(
                f"{path}: damaged: frames {place} and {place + 1} are {gaps[place] * tick:,.6g} s"
                " apart",
                hint=hint,
            )
    return stamps
