"""Video files encoded again and joined, and what is in a file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from lowtide.media.video.mux import JoinedFile, join_segments
from lowtide.media.video.other_streams import OutputStreamsPlan, plan_streams
from lowtide.media.video.picture_format import ColorTags, PictureFormat, frame_planes
from lowtide.media.video.video_encoder import (
    VideoEncoderSettings,
    VideoSegmentEncoder,
    segment_suffix,
)
from lowtide.media.video.video_facts import is_mirrored

NAMES = {"x264": "h264", "x265": "hevc", "svtav1": "av1", "prores": "prores", "ffv1": "ffv1"}


def decode(path: Path) -> list[Any]:
    """Frames of the picture."""
    with av.open(str(path)) as opened:
        return list(opened.decode(_picture(opened)))


def encode_segments(
    frames: list[Any],
    folder: Path,
    *,
    step: int = 7,
    codec: str = "x264",
    pix_fmt: str = "",
    tags: ColorTags | None = None,
    pixel_aspect: Fraction | None = None,
) -> list[Path]:
    """Encode frames again, ``step`` in a file."""
    folder.mkdir(exist_ok=True)
    paths = []
    for first in range(0, len(frames), step):
        path = folder / f"{first:04}{segment_suffix(NAMES[codec])}"
        part = frames[first : first + step]
        size = part[0].width, part[0].height
        stored = PictureFormat(*size, pix_fmt or part[0].format.name, tags or ColorTags())
        encoder = VideoSegmentEncoder(
            path,
            VideoEncoderSettings(codec),
            stored,
            time_base=part[0].time_base,
            pixel_aspect=pixel_aspect,
        )
        for frame in part:
            fitting = frame.reformat(format=stored.name) if pix_fmt else frame
            encoder.write(frame_planes(fitting, stored), frame.pts)
        encoder.close()
        paths.append(path)
    return paths


def enlarge(
    source: Path,
    target: Path,
    *,
    frames: slice | None = None,
    step: int = 7,
    codec: str = "x264",
    pix_fmt: str = "",
    sound: str = "auto",
    **keywords: Any,
) -> tuple[OutputStreamsPlan, JoinedFile]:
    """Encode the picture of ``source`` again, and join it with the rest in ``target``."""
    chosen = decode(source)[frames or slice(None)]
    paths = encode_segments(
        chosen, target.parent / f"{target.name}.work", step=step, codec=codec, pix_fmt=pix_fmt
    )
    cut = frames is not None
    plan = plan_streams(source, target, codec=NAMES[codec], cut=cut, sound=sound)
    first = chosen[0]
    joined = join_segments(
        plan,
        paths,
        target,
        stamps=np.array([frame.pts for frame in chosen]),
        time_base=first.time_base,
        rotation=first.rotation,
        mirrored=is_mirrored(first),
        cut=cut,
        **keywords,
    )
    return plan, joined


class Contents:
    """What is in a video file, with all times in seconds."""

    def __init__(self, path: Path) -> None:
        with av.open(str(path)) as opened:
            self.metadata = dict(opened.metadata)
            self.chapters = [_chapter(entry) for entry in opened.chapters()]
            shown = _picture(opened)
            self.tick = shown.time_base
            self.rate = shown.average_rate
            self.picture_metadata = dict(shown.metadata)
            streams = [s for s in opened.streams if s.index != shown.index]
            self.streams = [
                (s.type, s.language, s.metadata.get("title") or s.metadata.get("name"))
                for s in streams
            ]
            self.marks = [int(s.disposition) for s in streams]
            self.attachments = {s.name: s.data for s in opened.streams if s.type == "attachment"}
        self.frames = [frame.pts * frame.time_base for frame in decode(path)]
        self.sounds = _packets(path, "audio")
        self.texts = _packets(path, "subtitle")
        self.covers = _packets(path, "video")[1:]


def _picture(opened: Any) -> Any:
    return next(s for s in opened.streams.video if not int(s.disposition) & 1024)


def _packets(path: Path, kind: str) -> list[list[tuple[bytes, Fraction, Fraction]]]:
    """Bytes, time and duration of the packets of each stream of a kind; MP4's pauses left out."""
    found = []
    with av.open(str(path)) as opened:
        count = len([s for s in opened.streams if s.type == kind])
    for place in range(count):
        with av.open(str(path)) as opened:
            stream = [s for s in opened.streams if s.type == kind][place]
            found.append(
                [
                    (bytes(p), (p.pts or 0) * p.time_base, (p.duration or 0) * p.time_base)
                    for p in opened.demux(stream)
                    if p.size and bytes(p) != b"\0\0"
                ]
            )
    return found


def _chapter(entry: Any) -> tuple[float, float, str]:
    start, end = (float(entry[key] * entry["time_base"]) for key in ("start", "end"))
    return start, end, entry["metadata"]["title"]
