"""Bytes and seconds of a network's run on a small tile."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from lowtide.memory.costs import ProbePoint
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.meter import cuda_peaks, resident_peak_bytes
from lowtide.streaming.engine.source_run import IdentityAdapter
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.tile_step import NetworkTileRunner

MAX_PROBE_SECONDS = 4.0  # seconds allowed for one more probe


def probe_point(network: RunnableNetwork, side: int) -> ProbePoint:
    """Measure bytes and seconds of one square tile, ``side`` pixels wide."""
    work = tile_work(network, side)
    if network.free_memory is not None:
        # All resident bytes are live or kept for the next call, and a plan must count both.
        seconds = best_seconds(work, network.device)
        live = resident = _resident_bytes(network.free_memory, work, runs=3)
    elif network.device == "cpu":
        live, resident, seconds = _measure_cpu(work)
    else:
        seconds = best_seconds(work, network.device)
        live, resident = _cuda_peaks(work, network.device)
    return ProbePoint(pixels=side * side, peak_bytes=live, resident_bytes=resident, seconds=seconds)


def _measure_cpu(work: Callable[[], None]) -> tuple[int, int, float]:
    """Return (live bytes, resident bytes, seconds) of a run.

    Repeats fewer times if runs are long.
    """
    clock = _Clock("cpu")
    with clock:
        live = live_peak_bytes(work)

    def timed() -> None:
        with clock:
            work()

    # What the heap keeps shows from the second run on.
    resident = resident_peak_bytes(timed, 3)
    # The memory meter takes a negligible share of long runs.
    long = clock.seconds > MAX_PROBE_SECONDS / 8
    return live, resident, clock.seconds if long else best_seconds(work, "cpu")


def tile_work(network: RunnableNetwork, side: int) -> Callable[[], None]:
    """Return a function that runs one tile as the runner does."""
    step, tile = float_tile_runner(network), random_tile(network, side)

    def work() -> None:
        step([tile])

    return work


def live_peak(network: RunnableNetwork, call: Callable[[], object]) -> int:
    """Return the live bytes at the peak of a call."""
    if network.free_memory is not None:
        return _resident_bytes(network.free_memory, call, runs=1)
    if network.device == "cpu":
        return live_peak_bytes(call)
    return _cuda_peaks(call, network.device)[0]


def _resident_bytes(free_memory: Callable[[], None], call: Callable[[], object], runs: int) -> int:
    """Return the bytes that a few calls add to the process, with what they keep."""
    free_memory()
    peak = resident_peak_bytes(call, runs)
    free_memory()
    return peak


class _Clock:
    """Shortest time of the calls timed as its context.

    On the CPU the processor time of all threads, which other programs on the machine hardly
    disturb; on CUDA wall-clock time, since the work runs on the device.
    """

    def __init__(self, device: str) -> None:
        on_cpu = device == "cpu"
        self._read = time.process_time if on_cpu else time.perf_counter
        self._threads = torch.get_num_threads() if on_cpu else 1
        self._start, self.seconds = 0.0, float("inf")

    def __enter__(self) -> None:
        self._start = self._read()

    def __exit__(self, *_: object) -> None:
        self.seconds = min(self.seconds, (self._read() - self._start) / self._threads)


def best_seconds(call: Callable[[], object], device: str) -> float:
    """Return the best time of a few runs after one warm-up run."""
    call()
    clock, spent = _Clock(device), 0.0
    for _ in range(7):
        with clock:
            call()  # the step ends with its result on the host, so the device is synchronized
        spent += clock.seconds
        if spent > MAX_PROBE_SECONDS / 8:
            break
    return clock.seconds


def _cuda_peaks(call: Callable[[], object], device: str) -> tuple[int, int]:
    """Return the (allocated, reserved) peaks of a call above the bytes before it."""
    torch.cuda.empty_cache()
    reading = cuda_peaks(device).reader()
    reading.reset()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    call()
    allocated, reserved = reading.peaks()
    return allocated - before[0], reserved - before[1]


def float_tile_runner(network: RunnableNetwork) -> NetworkTileRunner:
    """Return the runner's step for tiles of floats."""
    return NetworkTileRunner(network, IdentityAdapter(network.out_channels))


def random_tile(network: RunnableNetwork, side: int, seed: int = 0) -> np.ndarray:
    """Return a random tile of shape (side, side, channels) in 0..1."""
    shape = (side, side, network.in_channels)
    return np.random.default_rng(seed).random(shape, np.float32)
