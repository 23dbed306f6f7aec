"""What ``video.py`` runs in fresh processes: the job, its profile, and the same encoder alone."""

from __future__ import annotations

import cProfile
import pstats
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.core.heap import tune_heap
from lowtide.core.progress import Progress


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


class Since:
    """Processor and wall seconds from the first finished frame of a job on."""

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None

    def __call__(self, event: Progress) -> None:
        """Note when the first frame is there."""
        if event.unit == "frames" and event.done and self._begun is None:
            self._begun = time.process_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Seconds until now."""
        assert self._begun is not None
        return time.process_time() - self._begun[0], time.perf_counter() - self._begun[1]


def cost(source: str, target: str, model: str, frames: int) -> dict[str, Any]:
    """Processor seconds a frame of a job by part, and how long its network waited for the others.

    The thread of the job runs the network, and converts colors where it asks for rows; others
    decode and encode. What is not the network is reading, color and writing.
    """
    tune_heap()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"threads": 1}
    for kind, clock in (("cpu", time.thread_time), ("wall", time.perf_counter)):
        since, profile = Since(), cProfile.Profile(clock)
        profile.runcall(
            lowtide.video,
            source,
            target,
            model=model,
            device="cpu",
            force=True,
            frames=f"0:{frames}",
            progress=since,
        )
        cpu, wall = since.seconds()
        spent = {name: _cumulative(profile, *place) for name, place in _PLACES.items()}
        if kind == "cpu":
            color = {name: spent[name] / frames for name in ("to_rgb_s", "to_yuv_s")}
            network = spent["frame"] / frames - sum(color.values())
            whole = cpu / (frames - 1)
            found |= {"job_s": whole, "network_s": network, "files_s": whole - network, **color}
            found["join_s"] = spent["finish"] / frames
        else:
            waited = spent["read_wait"] + spent["write_wait"]
            found |= {"wall_s": wall, "waited_share": waited / wall}
    return found


# By name: file and function whose time counts.
_PLACES = {
    "frame": ("video_job.py", "_run_frame"),
    "to_rgb_s": ("color.py", "rgb_rows"),
    "to_yuv_s": ("color.py", "write"),
    "finish": ("video_result.py", "finish"),
    "read_wait": ("queue.py", "get"),
    "write_wait": ("queue.py", "put"),
}


def _cumulative(profile: cProfile.Profile, file: str, function: str) -> float:
    """Seconds in a function and in what it calls."""
    stats: Any = pstats.Stats(profile)
    return sum(
        entry[3]
        for (path, _, name), entry in stats.stats.items()
        if Path(path).name == file and name == function
    )


def encoder_alone(source: str, target: str, frames: int) -> dict[str, float]:
    """Processor seconds a frame of decoding and of the encoder, by PyAV without anything between.

    What a frame costs at least, on this machine at this time.
    """
    import av

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
    return {"decode_s": decoded / frames, "encode_s": encoded / frames}
