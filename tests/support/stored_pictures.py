"""Clips whose files say more of their pictures than samples: crops, fields and transparency."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.bitstream import BitStreamFilterContext
from PIL import Image

from support.video_clips import Clip, gradient

FIELDS = {"x264-params": "interlaced=1:tff=1"}
COLOR = {"color_primaries": 1, "color_trc": 1, "colorspace": 1, "color_range": 1}
DARK, BRIGHT = 60, 200


def framed(left: int = 0, right: int = 0, top: int = 0, bottom: int = 0) -> Callable[..., Any]:
    """Draw frames that are dark where they are to be shown, and bright outside of that."""

    def drawn(width: int, height: int, pix_fmt: str, place: int) -> Any:
        rows = np.full((height, width, 3), BRIGHT, np.uint8)
        rows[top : height - bottom, left : width - right] = DARK + place
        return av.VideoFrame.from_ndarray(rows, "rgb24").reformat(format=pix_fmt)

    return drawn


def cropped_mkv(path: Path, first: tuple[str, int], second: tuple[str, int], **more: Any) -> Path:
    """Two of Matroska's PixelCrop elements, in the place of what it says of color."""
    names = {"left": b"\xcc", "right": b"\xdd", "top": b"\xbb", "bottom": b"\xaa"}
    data = Clip(frames=3, tags=COLOR, **more).write(path).read_bytes()
    place = data.index(b"\x55\xb0")
    size = 3 + data[place + 2] - 0x80
    made = b"".join(b"\x54" + names[side] + b"\x81" + bytes([n]) for side, n in (first, second))
    made += b"\xec" + bytes([0x80 + size - len(made) - 2])  # the rest is void
    path.write_bytes(data[:place] + made.ljust(size, b"\0") + data[place + size :])
    return path


def clean_mp4(path: Path, width: int, height: int, right: int, down: int, **more: Any) -> Path:
    """A clean aperture of ``width`` and ``height``, whose center lies ``right`` and ``down``."""
    data = Clip(frames=3, pixel_aspect=1, tags=COLOR, **more).write(path).read_bytes()
    place = min(data.index(name) - 4 for name in (b"colr", b"pasp", b"btrt") if name in data)
    end = place
    while data[end + 4 : end + 8] in (b"colr", b"pasp", b"btrt"):
        end += int.from_bytes(data[end : end + 4], "big")
    clap = struct.pack(">4s8i", b"clap", width, 1, height, 1, right, 1, down, 1)
    free = end - place - 4 - len(clap)
    made = struct.pack(">I", 4 + len(clap)) + clap + struct.pack(">I4s", free, b"free")
    path.write_bytes(data[:place] + made + bytes(free - 8) + data[end:])
    return path


def cropped_h264(path: Path, source: Path, **sides: int) -> Path:
    """The packets of a clip, whose sequence header crops more."""
    text = ":".join(f"crop_{side}={count}" for side, count in sides.items())
    with av.open(str(source)) as opened, av.open(str(path), "w") as output:
        old = opened.streams.video[0]
        new = output.add_stream_from_template(old, opaque=True)
        header = BitStreamFilterContext(f"h264_metadata={text}", old, new)
        for packet in opened.demux(old):
            for made in header.filter(packet) if packet.size else ():
                made.stream = new
                output.mux(made)
    return path


def gif(path: Path, *corners: bool) -> Path:
    """An animated GIF of frames of one color, of which some have a corner that is transparent."""
    frames = []
    for place, corner in enumerate(corners):
        rows = np.full((32, 48), place, np.uint8)
        rows[:8, :8] = 255 if corner else place
        frames.append(Image.fromarray(rows).convert("P"))
        frames[-1].putpalette([90, 120, 40] * 255 + [0, 0, 0])
    more = {"transparency": 255, "disposal": 2, "optimize": False, "duration": 80}
    frames[0].save(path, save_all=True, append_images=frames[1:], **more)
    return path


def see_through(*alphas: int) -> Callable[..., Any]:
    """Draw frames, each with so much alpha in its left half, and opaque ones after them."""

    def drawn(width: int, height: int, pix_fmt: str, place: int) -> Any:
        rows = np.full((height, width, 4), (90, 120, 40 + place, 255), np.uint8)
        rows[:, : width // 2, 3] = (*alphas, 255)[min(place, len(alphas))]
        return av.VideoFrame.from_ndarray(rows, "rgba").reformat(format=pix_fmt)

    return drawn


def combed(width: int, height: int, pix_fmt: str, place: int) -> Any:
    """A bright column that moves from field to field."""
    rows = np.full((height, width, 3), DARK, np.uint8)
    for field in (0, 1):
        at = 8 + 4 * place + 2 * field
        rows[field::2, at : at + 12] = BRIGHT
    return av.VideoFrame.from_ndarray(rows, "rgb24").reformat(format=pix_fmt)


def packed(name: str) -> Callable[..., Any]:
    """Draw gradients, whose samples of 4:2:2 are packed as ``name`` says."""

    def drawn(width: int, height: int, pix_fmt: str, place: int) -> Any:
        return gradient(width, height, "yuv422p", place).reformat(format=name)

    return drawn
