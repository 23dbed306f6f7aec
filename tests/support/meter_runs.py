"""What the tests of the meter run in processes that did nothing before: memory that another test
let go of meanwhile would be in the figures."""

import gc
import time

import numpy as np

from lowtide.core.heap import trim_heap
from lowtide.core.units import MIB
from lowtide.memory.meter import HostMemoryMeter, open_meter, resident_peak_bytes


def _started() -> HostMemoryMeter:
    gc.disable()  # what imports left behind is collected before, or not at all
    trim_heap(collect=True)
    meter = open_meter("cpu")
    assert isinstance(meter, HostMemoryMeter)
    meter.start()
    return meter


def an_allocation_and_its_end() -> dict[str, int]:
    """100 MiB that come and go."""
    meter = _started()
    block = np.ones(100 * MIB, np.uint8)
    there = meter.current_bytes
    del block
    trim_heap()
    found = {"there": there, "gone": meter.current_bytes, "peak": meter.peak_bytes}
    meter.stop()
    return found


def between_two_looks() -> dict[str, int | None]:
    """100 MiB for a fifth of a second, in which nobody asks."""
    meter = _started()
    block = np.ones(100 * MIB, np.uint8)
    time.sleep(0.2)
    del block
    usage = meter.lap()
    meter.stop()
    return {"peak": usage.peak_bytes, "high_water": usage.high_water_bytes}


def third_lap() -> int:
    """64 MiB that stay, and 100 that are gone after the first lap."""
    meter = _started()
    kept = np.ones(64 * MIB, np.uint8)
    block = np.ones(100 * MIB, np.uint8)
    meter.lap()
    del block
    meter.lap()
    peak = meter.lap().peak_bytes
    meter.stop()
    return peak if len(kept) else 0


def loaded_before() -> dict[str, int | None]:
    """80 MiB that do not count, then 40 that do."""
    meter = _started()
    with meter.excluding():
        library = np.ones(80 * MIB, np.uint8)
    before = meter.current_bytes
    block = np.ones(40 * MIB, np.uint8)
    usage = meter.lap()
    meter.stop()
    assert len(library) > len(block)
    return {"before": before, "peak": usage.peak_bytes, "high_water": usage.high_water_bytes}


def of_a_call() -> int:
    """A call that holds 64 MiB for a moment, by `resident_peak_bytes`."""

    def work() -> None:
        block = np.ones(64 * MIB, np.uint8)
        time.sleep(0.02)
        del block

    return resident_peak_bytes(work)
