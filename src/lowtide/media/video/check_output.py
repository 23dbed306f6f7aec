"""Reading a written video file again before it gets its name."""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import OutputError
from lowtide.media.video.mux import JoinedFile
from lowtide.media.video.other_streams import find_picture, load_av, open_source


def check_output(joined: JoinedFile) -> None:
    """Decode every frame of a written file and compare count and times with what was due.

    Raises:
        OutputError: A frame is missing or one too many, cannot be decoded, or lies more than one
            tick of the output's clock from its time.
    """
    av = load_av()
    with open_source(joined.path) as opened:
        stream = opened.streams[find_picture(opened, joined.path)]
        tick = stream.time_base
        try:
            found = [frame.pts for frame in opened.decode(stream)]
        except av.error.FFmpegError as error:
            raise OutputError(
                f"{joined.path}: what was written cannot be read ({error})"
            ) from error
    if len(found) != len(joined.stamps):
        raise OutputError(
            f"{joined.path}: {len(joined.stamps)} frames were written and {len(found)} read again"
        )
    due = joined.stamps * float(joined.time_base)
    late = np.abs(np.array(found, np.float64) * float(tick) - due)
    if len(late) and late.max() > float(tick) * (1 + 1e-6):
        worst = int(late.argmax())
        raise OutputError(
            f"{joined.path}: frame {worst} was due at {due[worst]:.6f} s and lies"
            f" {late[worst]:.6f} s from there (a tick of the file is {float(tick):.6f} s)"
        )
