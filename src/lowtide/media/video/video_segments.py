"""Segments: short files of encoded frames, joined by the order of their packets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import OutputError
from lowtide.media.video.opened_video import open_source, packets_with_data


@dataclass(frozen=True)
class SegmentOrder:
    """Order in which a run's frames are stored.

    Attributes:
        rank: Place in presentation of each packet, over all segments (N,), int64.
        delay: Packets that are stored before one of them is shown.
    """

    rank: np.ndarray
    delay: int


def segment_suffix(codec: str) -> str:
    """Ending of segments of ``codec``, by FFmpeg's name.

    Matroska would round times to milliseconds, by which the order of close frames is lost.
    """
    return ".mov" if codec == "prores" else ".mp4"


def read_order(segments: Sequence[Path], due: int) -> SegmentOrder:
    """Order of the packets of segments that follow each other and hold ``due`` frames.

    The stamps of a segment say only which frame comes first: its container may have rounded them.

    Raises:
        OutputError: There are more or fewer frames, two of a segment have one stamp, or segments
            differ in what a decoder has to know beforehand, of which a file holds one.
    """
    ranks: list[np.ndarray] = []
    count = 0
    headers = set()
    for path in segments:
        with open_source(path) as opened:
            shown = opened.streams.video[0]
            headers.add(shown.codec_context.extradata)
            found = packets_with_data(opened.demux(shown))
            stamps = [packet.pts for packet in found]
        if None in stamps or len(set(stamps)) != len(stamps):
            raise OutputError(f"{path}: the segment's frames cannot be told by their times")
        ranks.append(count + np.argsort(np.argsort(np.array(stamps, np.int64))))
        count += len(stamps)
    if len(headers) > 1:
        raise OutputError(
            f"{segments[0].parent}: the segments were encoded with different settings"
        )
    if count != due:
        raise OutputError(f"{due} frames were due, and {count} are in the encoded segments")
    rank = np.concatenate(ranks)
    delay = int(np.max(np.arange(count) - rank, initial=0))
    return SegmentOrder(rank, delay)


def decoding_stamps(stamps: np.ndarray, delay: int) -> np.ndarray:
    """Decoding stamps of N packets whose frames are shown at ``stamps`` (N,), rising.

    The stamps themselves, ``delay`` packets late: they rise, and none lies after its frame.
    """
    step = max(1, int(stamps[1] - stamps[0])) if len(stamps) > 1 else 1
    before = stamps[0] - step * np.arange(delay, 0, -1)
    return np.concatenate([before, stamps])[: len(stamps)]


def picture_packets(
    segments: Sequence[Path],
    order: SegmentOrder,
    stamps: np.ndarray,
    durations: np.ndarray,
    time_base: Fraction,
) -> Iterator[Any]:
    """Packets of all segments with their frames' stamps and durations (N,) of ``time_base``."""
    decoding = decoding_stamps(stamps, order.delay)
    place = 0
    for path in segments:
        with open_source(path) as opened:
            for packet in packets_with_data(opened.demux(opened.streams.video[0])):
                frame = order.rank[place]
                packet.time_base = time_base
                packet.pts, packet.dts = int(stamps[frame]), int(decoding[place])
                packet.duration = int(durations[frame])
                place += 1
                yield packet
