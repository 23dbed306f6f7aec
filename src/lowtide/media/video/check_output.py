"""Reading a written video file again before it gets its name."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import OutputError
from lowtide.media.video.mux import JoinedFile
from lowtide.media.video.opened_video import find_picture, load_av, open_source, packets_with_data
from lowtide.media.video.packet_times import WrittenStream
from lowtide.media.video.stream_copier import is_pause

# Times are compared as floats of seconds: a billionth is less than any file's tick.
_ROUNDING = 1e-9


def check_output(joined: JoinedFile, *, after_frame: Callable[[], object] | None = None) -> None:
    """Decode every frame of a written file and compare count and times with what was due.

    Sound and subtitles are compared by where they begin, sound by its bytes too.

    Args:
        joined: What `join` wrote.
        after_frame: Called after each frame, to show progress or to raise an error that stops the
            work.

    Raises:
        OutputError: A frame is missing or one too many, cannot be decoded, or lies more than one
            tick of the output's clock from its time; sound or subtitles are missing or begin
            elsewhere.
    """
    av = load_av()
    with open_source(joined.path) as opened:
        shown: Any = opened.streams[find_picture(opened, joined.path)]
        others: list[Any] = [*opened.streams.audio, *opened.streams.subtitles]
        found = {stream.index: WrittenStream(stream.type) for stream in others}
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
    path: Path, kind: str, due: list[WrittenStream], read: list[tuple[WrittenStream, Fraction]]
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
