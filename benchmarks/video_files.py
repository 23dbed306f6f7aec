"""Clips and model files of ``video.py``, and what is compared of two video files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from support import video_clips

# Red, green and blue in another order, each with a share of the next, so that all matter.
MIXED = ((0.0, 0.75, 0.25), (0.25, 0.0, 0.75), (0.75, 0.25, 0.0))
SAME = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def color_model(path: Path, mix: Any = SAME) -> str:
    """A model file of scale 1 that mixes colors pixel by pixel: a Compact network without depth.

    Its two convolutions add to a picture what ``mix``, a matrix of R, G, B, changes.
    """
    from safetensors.torch import save_file
    from spandrel.architectures.Compact import Compact

    network = Compact(num_feat=4, num_conv=0, upscale=1)
    into, between, out = network.body
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
        between.weight.fill_(1)
        into.weight[:3, :, 1, 1] = torch.eye(3)
        out.weight[:, :3, 1, 1] = torch.tensor(mix) - torch.eye(3)
    save_file(dict(network.state_dict()), path)
    return str(path)


def walk(photo: np.ndarray) -> Callable[[int, int, str, int], Any]:
    """What draws a clip's frames: a walk over a photograph (H, W, 3)."""

    def drawn(width: int, height: int, pix_fmt: str, place: int) -> Any:
        rows = np.ascontiguousarray(photo[place : place + height, 2 * place : 2 * place + width])
        frame = av.VideoFrame.from_ndarray(rows, "rgb24")
        return frame.reformat(format=pix_fmt)

    return drawn


# By what they are: who writes them, the file's name and the photograph of scikit-image.
CLIPS = {
    "10-bit HEVC, uneven frames, mkv": (video_clips.full_mkv, "full.mkv", "astronaut"),
    "rotated, mp4": (video_clips.rotated_mp4, "rotated.mp4", "coffee"),
    "untagged, 25 a second, mp4": (video_clips.untagged_mp4, "untagged.mp4", "cat"),
}


def photograph_clip(folder: Path, name: str, frames: int, size: tuple[int, int]) -> Path:
    """One of the clips of photographs."""
    from skimage import data

    make, file, photo = CLIPS[name]
    drawn, (width, height) = walk(getattr(data, photo)()), size
    return make(folder / file, frames, width=width, height=height, drawn=drawn)


def looped(path: Path, frames: int, period: int, size: tuple[int, int], *, rate: int = 25) -> Path:
    """A clip with sound that repeats ``period`` frames of a photograph, ``rate`` a second."""
    from skimage import data

    drawn, (width, height) = walk(data.coffee()), size
    return video_clips.Clip(
        frames=frames,
        width=width,
        height=height,
        stamps=range(frames),
        time_base=Fraction(1, rate),
        sounds=(video_clips.Sound(seconds=frames / rate),),
        drawn=lambda *size: drawn(*size[:3], size[3] % period),
    ).write(path)


def anatomy(path: Path) -> dict[str, Any]:
    """What is to be the same in an output, by name; times are in seconds."""
    with av.open(str(path)) as opened:
        shown = opened.streams.video[0]
        frames = list(opened.decode(shown))
        found: dict[str, Any] = {
            "stamps": [frame.pts * frame.time_base for frame in frames],
            "tick": shown.time_base,
            "color tags": _color(frames[0]),
            "rotation": frames[0].rotation,
            "pixel aspect": shown.sample_aspect_ratio or Fraction(1),
            "title": opened.metadata.get("title"),
            "languages and titles": [
                (stream.type, stream.metadata.get("language", "und"), stream.metadata.get("title"))
                for stream in opened.streams
                if stream.type != "attachment"
            ],
            "dispositions": [int(stream.disposition) for stream in opened.streams],
            "chapters": [
                (*(one[key] * one["time_base"] for key in ("start", "end")), one["metadata"])
                for one in opened.chapters()
            ],
            "attachments": [(one.name, bytes(one.data)) for one in opened.streams.attachments],
        }
    packets = {kind: [*_packets(path, kind)] for kind in ("audio", "subtitle")}
    begin = {kind: [one[0][0] for one in streams if one] for kind, streams in packets.items()}
    return found | {"sound": packets["audio"], "subtitles": packets["subtitle"], "start": begin}


def _color(frame: Any) -> tuple[int, ...]:
    tags = frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range
    return tuple(int(tag) for tag in tags)


def _packets(path: Path, kind: str) -> Iterator[list[tuple[Fraction, bytes]]]:
    """Time and bytes of the packets of each stream of a kind."""
    with av.open(str(path)) as opened:
        numbers = [stream.index for stream in opened.streams if stream.type == kind]
    for number in numbers:
        with av.open(str(path)) as opened:
            packets = [one for one in opened.demux(opened.streams[number]) if one.size]
            yield [(one.pts * one.time_base, bytes(one)) for one in packets]


def compared(source: Path, target: Path) -> dict[str, Any]:
    """Frames, stamps, sound and all else of two files."""
    before, after = anatomy(source), anatomy(target)
    late = [abs(a - b) for a, b in zip(after["stamps"], before["stamps"], strict=False)]
    same = [name for name in before if name not in ("stamps", "tick")]
    return {
        "frames_in": len(before["stamps"]),
        "frames_out": len(after["stamps"]),
        "stamps_off_ticks": float(max(late) / after["tick"]),
        "tick_seconds": float(after["tick"]),
        "sound_packets": sum(map(len, before["sound"])),
        "sound_equal": before["sound"] == after["sound"],
        "start_equal": before["start"] == after["start"],
        "tags_equal": before["color tags"] == after["color tags"],
        "differs": [name for name in same if before[name] != after[name]],
    }


def all_packets(path: Path) -> list[tuple[int, int | None, int | None, bytes]]:
    """Stream, stamps and bytes of every packet."""
    with av.open(str(path)) as opened:
        found = [one for one in opened.demux() if one.size]
        return [(one.stream_index, one.pts, one.dts, bytes(one)) for one in found]
