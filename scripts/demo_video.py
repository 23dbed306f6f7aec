"""Make the clip of `make demo-video`, and a picture of a frame before and after.

    python scripts/demo_video.py clip demo/clip.mp4
    python scripts/demo_video.py picture demo/clip.mp4 demo/clip_x2.mp4 demo/clip_x2.png

The clip walks over the example photograph for two seconds, with a tone that rises.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import av
import numpy as np
import pyvips

from lowtide.media.video.color import rgb_rows
from lowtide.media.video.picture_format import frame_planes, picture_format_of

PHOTO = Path(__file__).parent.parent / "examples" / "coffee.jpg"
WIDTH, HEIGHT, FRAMES, RATE = 240, 160, 48, 24
SOUND_RATE = 48_000
# Width of the picture's panels, in pixels of the result.
PANEL = 400


def make_clip(path: Path) -> None:
    """Write the clip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    photo = pyvips.Image.new_from_file(str(PHOTO))
    with av.open(str(path), "w") as output:
        picture = output.add_stream("libx264", rate=RATE, options={"crf": "16"})
        picture.width, picture.height, picture.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        sound = output.add_stream("aac", rate=SOUND_RATE, layout="mono")
        for place in range(FRAMES):
            share = place / (FRAMES - 1)
            left, top = share * (photo.width - WIDTH), share * (photo.height - HEIGHT) / 2
            part = photo.crop(round(left), round(top), WIDTH, HEIGHT)
            frame = av.VideoFrame.from_ndarray(part.numpy(), "rgb24")
            output.mux(picture.encode(frame))
        output.mux(picture.encode(None))
        seconds = np.arange(SOUND_RATE * FRAMES // RATE) / SOUND_RATE
        wave = 0.2 * np.sin(2 * np.pi * (220 + 110 * seconds) * seconds)
        for first in range(0, len(wave), 1024):
            samples = wave[None, first : first + 1024].astype(np.float32)
            block = av.AudioFrame.from_ndarray(samples, "fltp", "mono")
            block.sample_rate, block.pts = SOUND_RATE, first
            output.mux(sound.encode(block))
        output.mux(sound.encode(None))


def draw(before: Path, after: Path, picture: Path) -> None:
    """Write a detail of the middle frame: enlarged by bicubic interpolation, and the result."""
    with av.open(str(after)) as made:
        count = sum(1 for _ in made.decode(video=0))
    small, large = (_frame(path, count // 2) for path in (before, after))
    bicubic = small.resize(
        large.width / small.width, vscale=large.height / small.height, kernel="cubic"
    )
    wide, high = min(PANEL, large.width), min(PANEL, large.height)
    left, top = (large.width - wide) // 2, (large.height - high) // 2
    panels = [one.crop(left, top, wide, high) for one in (bicubic, large)]
    pyvips.Image.arrayjoin(panels, across=2, shim=8, background=255).pngsave(str(picture))


def _frame(path: Path, index: int) -> pyvips.Image:
    with av.open(str(path)) as container:
        frame = next(islice(container.decode(video=0), index, None))
        format = picture_format_of(frame)
        rgb = rgb_rows(frame_planes(frame, format), format, 0, format.height)
    return pyvips.Image.new_from_array(np.rint(rgb.clip(0, 1) * 255).astype(np.uint8))


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[2:]]
    {"clip": make_clip, "picture": draw}[sys.argv[1]](*paths)
