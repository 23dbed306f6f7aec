"""Copies between a GPU and its host during a run, and whether kernels hid them."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]


def together(intervals: Sequence[Interval]) -> list[list[float]]:
    """Those that touch as one."""
    busy: list[list[float]] = []
    for first, last in sorted(intervals):
        if busy and first <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], last)
        else:
            busy.append([first, last])
    return busy


def overlapped(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float | None:
    """Which share of the time of ``copies`` some kernel ran; None without copies."""
    busy = together(kernels)
    ends = [last for _, last in busy]
    total = both = 0.0
    for first, last in copies:
        total += last - first
        for begin, end in busy[bisect(ends, first) :]:
            if begin >= last:
                break
            both += min(last, end) - max(first, begin)
    return both / total if total else None


def intervals(events: Sequence[dict[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """Intervals of copies between GPU and host, and of all else, in a trace."""
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = event["ts"], event["ts"] + event["dur"]
            between = "HtoD" in event["name"] or "DtoH" in event["name"]
            (copies if between else kernels).append(span)
    return copies, kernels


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """Copies between GPU and host during a run, how much of them was hidden, and GPU time."""
    # The trace as written by the profiler: its events as Python objects take minutes.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        copies, kernels = intervals(json.loads(trace.read_bytes())["traceEvents"])
    return {
        "copies_s": round(sum(last - first for first, last in copies) / 1e6, 4),
        "kernels": len(kernels),
        "kernels_s": round(sum(last - first for first, last in together(kernels)) / 1e6, 4),
        "copies_overlapped": overlapped(copies, kernels),
    }
