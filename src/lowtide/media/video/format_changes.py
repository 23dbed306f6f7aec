"""Pictures that change their size or format within a file, found before work starts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import ceil
from typing import Any

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import (
    damaged_error,
    load_av,
    open_video,
    packets_with_data,
    readable,
)
from lowtide.media.video.video_facts import VideoFacts

# Pixels that are decoded at most, some seconds of work: 480 frames of 1080p.
_PIXELS = 10**9


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
        for packet in packets_with_data(readable(container.demux(stream))):
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
