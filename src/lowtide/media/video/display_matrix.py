"""How players turn and mirror a picture, as FFmpeg's display matrix says it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_ONE = 1 << 16  # a factor of 1 in the matrix's fixed-point numbers
_ONE_OF_LAST = 1 << 30


def is_mirrored(frame: VideoFrame) -> bool:
    """Whether players mirror a decoded frame, which its ``rotation`` does not say."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return False
    (a, b, _), (c, d, _), _ = np.frombuffer(bytes(data), np.int32).reshape(3, 3).tolist()
    return a * d - b * c < 0


def display_matrix(rotation: int, mirrored: bool) -> list[int]:
    """Matrix of nine numbers that turns and mirrors a picture.

    Args:
        rotation: Degrees counterclockwise, as PyAV reads it from a frame, mirrored or not.
        mirrored: Whether the second axis is turned over.
    """
    sine, cosine = (round(_ONE * turn(math.radians(rotation))) for turn in (math.sin, math.cos))
    side = -1 if mirrored else 1
    return [cosine, -sine, 0, side * sine, side * cosine, 0, 0, 0, _ONE_OF_LAST]
