"""What a run of a network on a small tile takes: bytes, and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from lowtide.core.signal import ImageInfo
from lowtide.memory.costs import ProbePoint
from lowtide.memory.measurement.live_peak import live_peak_bytes
from lowtide.memory.meter import cuda_peaks, resident_peak_bytes
from lowtide.streaming.tiles.tile_step import NetworkSpec, TileStep

PATIENCE = 4.0  # seconds that one more probe may be expected to take


def probe_point(network: NetworkSpec, side: int) -> ProbePoint:
    """What one square tile of so many pixels a side takes."""
    work = tile_work(network, side)
    if network.let_go is not None:
        # All that is resident lives, or is kept for the next call, which a plan cannot do without.
        seconds = best_seconds(work, network.device)
        alive = resident = _resident(network.let_go, work, runs=3)
    elif network.device == "cpu":
        alive, resident, seconds = _on_cpu(work)
    else:
        seconds = best_seconds(work, network.device)
        alive, resident = _cuda_peaks(work, network.device)
    return ProbePoint(
        pixels=side * side, peak_bytes=alive, resident_bytes=resident, seconds=seconds
    )


def _on_cpu(work: Callable[[], None]) -> tuple[int, int, float]:
    """(Bytes alive, bytes resident, seconds) of a run, by few runs if they are long."""
    clock = _Clock("cpu")
    with clock:
        alive = live_peak_bytes(work)

    def timed() -> None:
        with clock:
            work()

    # What a heap keeps shows from the second run on.
    resident = resident_peak_bytes(timed, 3)
    # The meter beside them takes next to nothing of runs that are long.
    long = clock.seconds > PATIENCE / 8
    return alive, resident, clock.seconds if long else best_seconds(work, "cpu")


def tile_work(network: NetworkSpec, side: int) -> Callable[[], None]:
    """What the runner does with one tile, the conversion to samples included."""
    step, tile = tile_step(network), random_tile(network, side)

    def work() -> None:
        step.to_samples(step([tile])[0])

    return work


def live_peak(network: NetworkSpec, call: Callable[[], object]) -> int:
    """Bytes alive at the peak of a call."""
    if network.let_go is not None:
        return _resident(network.let_go, call, runs=1)
    if network.device == "cpu":
        return live_peak_bytes(call)
    return _cuda_peaks(call, network.device)[0]


def _resident(let_go: Callable[[], None], call: Callable[[], object], runs: int) -> int:
    """Bytes that a few calls add to the process, those included that are kept between them."""
    let_go()
    peak = resident_peak_bytes(call, runs)
    let_go()
    return peak


class _Clock:
    """The least that a call took of those inside the clock's context.

    On the CPU this is the processor time shared by the threads, which other programs on the
    machine hardly disturb; on CUDA the time of day, since the work is done elsewhere.
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
    """The best of a few runs after one to warm up."""
    call()
    clock, spent = _Clock(device), 0.0
    for _ in range(7):
        with clock:
            call()  # the step ends with its result on the host, so the device is done
        spent += clock.seconds
        if spent > PATIENCE / 8:
            break
    return clock.seconds


def _cuda_peaks(call: Callable[[], object], device: str) -> tuple[int, int]:
    """(allocated, reserved) peaks of a call, above what was there before."""
    torch.cuda.empty_cache()
    reading = cuda_peaks(device).reading()
    reading.restart()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    call()
    allocated, reserved = reading.peaks()
    return allocated - before[0], reserved - before[1]


def tile_step(network: NetworkSpec) -> TileStep:
    """The step that the runner makes with tiles of an image in 8 bits."""
    return TileStep(network, ImageInfo(1, 1, network.in_channels))


def random_tile(network: NetworkSpec, side: int, seed: int = 0) -> np.ndarray:
    """(side, side, channels) uint8."""
    shape = (side, side, network.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
