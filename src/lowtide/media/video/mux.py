"""Joining segments and the source's other streams into one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.atomic_file import write_error
from lowtide.core.errors import OutputError
from lowtide.media.video.other_streams import (
    StreamPlan,
    load_av,
    open_source,
    packets_with_data,
)
from lowtide.media.video.video_segments import picture_packets, read_order

# Keys of metadata that a muxer writes itself, about the file it writes.
_OWN_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder", "duration"}


@dataclass(frozen=True)
class JoinedFile:
    """A file that `join` wrote, as `check_output` reads it again.

    Attributes:
        path: The file.
        stamps: Stamps of its frames (N,), int64, of ``time_base``.
        time_base: Seconds of one stamp.
    """

    path: Path
    stamps: np.ndarray
    time_base: Fraction


def join(
    plan: StreamPlan,
    segments: Sequence[Path],
    target: Path,
    *,
    stamps: np.ndarray,
    time_base: Fraction,
    last_duration: int | None = None,
    pixel_aspect: Fraction | None = None,
    rotation: int = 0,
    cut: bool = False,
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
        cut: Whether the frames are a part of the source: the other streams are cut to its time, and
            the part begins at 0.

    Raises:
        OutputError: The file cannot be written, or the segments hold another number of frames. No
            file is left.
    """
    av = load_av()
    order = read_order(segments)
    if len(order.rank) != len(stamps):
        raise OutputError(
            f"{target}: {len(stamps)} frames were due and {len(order.rank)} were encoded"
        )
    durations = _durations(stamps, last_duration)
    packets = picture_packets(segments, order, stamps, durations, time_base)
    try:
        _write(plan, segments[0], target, packets, time_base, pixel_aspect, rotation)
    except (OSError, ValueError, av.error.FFmpegError) as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise write_error(target, error) from error
        raise OutputError(f"{target}: cannot be written ({error})") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return JoinedFile(target, stamps, time_base)


def _durations(stamps: np.ndarray, last: int | None) -> np.ndarray:
    gaps = np.diff(stamps)
    if last is None:
        last = int(gaps[-1]) if len(gaps) else 1
    return np.append(gaps, last)


def _write(
    plan: StreamPlan,
    segment: Path,
    target: Path,
    picture: Iterator[Any],
    time_base: Fraction,
    pixel_aspect: Fraction | None,
    rotation: int,
) -> None:
    av = load_av()
    with av.open(str(target), "w", format=plan.container) as output, open_source(segment) as first:
        shown = output.add_stream_from_template(first.streams.video[0], opaque=True)
        shown.time_base = time_base
        if pixel_aspect:
            shown.codec_context.sample_aspect_ratio = pixel_aspect
        if rotation:
            shown.set_display_rotation(rotation)
        if plan.source is None:
            _mux(output, _placed(picture, lambda packet: shown))
            return
        with open_source(plan.source) as source:
            places: dict[int, Any] = {}
            for planned in plan.kept:
                stream = source.streams[planned.index]
                made = output.add_stream_from_template(stream, opaque=True)
                made.metadata.update(stream.metadata)
                made.disposition = int(stream.disposition)
                places[planned.index] = made
            output.metadata.update({k: v for k, v in source.metadata.items() if k not in _OWN_KEYS})
            output.set_chapters(source.chapters())
            kept = [source.streams[index] for index in places]
            others = packets_with_data(source.demux(*kept)) if kept else iter(())
            both = _by_time(
                _placed(picture, lambda packet: shown),
                _placed(others, lambda packet: places[packet.stream_index]),
            )
            _mux(output, both)


def _placed(packets: Iterator[Any], stream_of: Callable[[Any], Any]) -> Iterator[Any]:
    for packet in packets:
        packet.stream = stream_of(packet)
        yield packet


def _by_time(one: Iterator[Any], other: Iterator[Any]) -> Iterator[Any]:
    """Packets of both, the earlier first: a muxer holds the ones that it waits for in memory."""
    a, b = next(one, None), next(other, None)
    while a is not None or b is not None:
        if b is None or (a is not None and _time(a) <= _time(b)):
            yield a
            a = next(one, None)
        else:
            yield b
            b = next(other, None)


def _time(packet: Any) -> Fraction:
    stamp = packet.dts if packet.dts is not None else packet.pts
    return (stamp or 0) * packet.time_base


def _mux(output: Any, packets: Iterator[Any]) -> None:
    for packet in packets:
        output.mux_one(packet)
