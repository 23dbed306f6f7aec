"""Ranges of a video's frames, by their numbers or by time."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.media.video.video_facts import VideoFacts


def frame_range(facts: VideoFacts, frames: str | None, time: str | None) -> tuple[int, int]:
    """Return the first frame and the one after the last that ``A:B`` names; all by default.

    ``frames`` are numbers from 0, or those of image files; ``time`` is in seconds from the first
    frame.

    Raises:
        UsageError: The text is no range, or holds no frame.
    """
    if frames is not None:
        first, last = _parse(frames, "--frames", "24:48", int)
        numbers = facts.numbers
        start = int(np.searchsorted(numbers, first or 0))
        stop = facts.frames if last is None else int(np.searchsorted(numbers, last))
    elif time is not None:
        first, last = _parse(time, "--time", "1.5:4", float)
        times = (facts.stamps - facts.stamps[0]) * float(facts.time_base)
        start = int(np.searchsorted(times, (first or 0) - 1e-6))
        stop = facts.frames if last is None else int(np.searchsorted(times, last - 1e-6))
    else:
        start, stop = 0, facts.frames
    if start >= stop:
        given = f"--frames {frames}" if frames is not None else f"--time {time}"
        raise UsageError(f"{given} holds no frame of {facts.path}, which has {facts.extent}")
    return start, stop


def _parse(text: str, option: str, example: str, kind: Any) -> tuple[Any, Any]:
    first, colon, last = text.partition(":")
    try:
        values = [kind(one) if one.strip() else None for one in (first, last)]
    except ValueError:
        values = []
    if not colon or not values or any(one is not None and one < 0 for one in values):
        raise UsageError(f"{option} {text!r} is not a range A:B", hint=f"{option} {example}")
    return values[0], values[1]
