"""What ``video.py`` runs in fresh processes: the job, and its parts alone."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

import lowtide
from lowtide.core.heap import tune_heap
from lowtide.core.progress import Progress
from lowtide.jobs.clips.rows import FrameRowSink, FrameRowSource
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.video_encoder import VideoEncoderSettings, VideoSegmentEncoder
from lowtide.media.video.video_facts import inspect_video
from lowtide.media.video.video_reader import VideoReader
from lowtide.streaming.row_window import READ_ROWS


def run(source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """The job on one file, and what its report says."""
    tune_heap()  # as the command line does
    started = time.process_time()
    report = lowtide.video(source, target, device="cpu", force=True, **options)
    report.raise_for_failures()
    (one,) = report.videos
    assert one.memory is not None and one.plan is not None
    return {
        **one.memory.model_dump(
            include={"predicted_bytes", "upper_bytes", "peak_bytes", "high_water_bytes"}
        ),
        "plan": one.plan.title,
        "encoder": f"{one.encoder}, {one.pixel_format}",
        "cpu_s": round(time.process_time() - started, 2),
        "threads": torch.get_num_threads(),
    }


def job_cost(source: str, target: str, model: str, frames: int) -> dict[str, float]:
    """Processor seconds a frame of a job, and those of threads other than the network's.

    From the first finished frame on.
    """
    tune_heap()
    torch.set_num_threads(1)
    begun: list[tuple[float, float]] = []

    def note(event: Progress) -> None:
        if event.unit == "frames" and event.done and not begun:
            begun.append((time.process_time(), time.thread_time()))

    part = f"0:{frames}"
    lowtide.video(source, target, model=model, device="cpu", force=True, frames=part, progress=note)
    whole, own = time.process_time() - begun[0][0], time.thread_time() - begun[0][1]
    return {"job_s": whole / (frames - 1), "other_threads_s": (whole - own) / (frames - 1)}


def parts_cost(source: str, target: str, frames: int, turns: int) -> dict[str, float]:
    """Processor seconds a frame of reading, color and writing, each alone: medians.

    Next to them those of FFmpeg's decoder and encoder by PyAV, with nothing between: what a frame
    costs at least on this machine at this time.
    """
    tune_heap()
    facts = inspect_video(Path(source))
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        started = time.process_time()
        planes = [
            [np.array(plane) for plane in frame.planes] for frame in VideoReader(facts, 0, frames)
        ]
        moments = {"read_s": time.process_time() - started}
        moments |= _color_seconds(planes, facts.format)
        started = time.process_time()
        encoder = VideoSegmentEncoder(
            Path(target), VideoEncoderSettings("x264"), facts.format, time_base=facts.time_base
        )
        for stamp, one in zip(facts.stamps, planes, strict=False):
            encoder.write(one, int(stamp))
        encoder.close()
        moments["encode_s"] = time.process_time() - started
        moments |= _ffmpeg_seconds(source, target, frames)
        for name, seconds in moments.items():
            found.setdefault(name, []).append(seconds / frames)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _color_seconds(frames: list[Any], format: PictureFormat) -> dict[str, float]:
    """Seconds of both conversions, by as many rows as a whole plan asks for."""
    there = back = 0.0
    for planes in frames:
        started = time.process_time()
        source = FrameRowSource(planes, format)
        bands = [
            (first, source.read(first, first + READ_ROWS))
            for first in range(0, format.height, READ_ROWS)
        ]
        there += time.process_time() - started
        started, made = time.process_time(), FrameRowSink(source.info, format)
        for first, rows in bands:
            made.write(first, rows)
        back += time.process_time() - started
        assert all((a == b).all() for a, b in zip(made.planes, planes, strict=True))
    return {"to_rgb_s": there, "to_yuv_s": back}


def _ffmpeg_seconds(source: str, target: str, frames: int) -> dict[str, float]:
    with av.open(source) as opened:
        shown = opened.streams.video[0]
        size, started, kept = (shown.width, shown.height), time.process_time(), []
        for frame in opened.decode(shown):
            kept.append(frame)
            if len(kept) == frames:
                break
        decoded = time.process_time() - started
    with av.open(target, "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"preset": "medium", "crf": "18"})
        stream.width, stream.height = size
        started = time.process_time()
        for frame in kept:
            frame.pts, frame.pict_type = None, 0
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        encoded = time.process_time() - started
    return {"ffmpeg_s": decoded + encoded}
