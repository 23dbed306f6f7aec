"""Measuring memory: what is allocated is seen."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowtide.core.heap import trim_heap
from lowtide.core.units import MIB
from lowtide.memory.measuring.live import live_peak_bytes
from lowtide.memory.meter import (
    HostMeter,
    available_host_bytes,
    open_meter,
    resident_peak_bytes,
    total_host_bytes,
)


@pytest.fixture
def meter():
    trim_heap(collect=True)
    meter = open_meter("cpu")
    assert isinstance(meter, HostMeter)
    meter.start()
    yield meter
    meter.stop()


def test_an_allocation_is_seen_and_so_is_its_end(meter):
    block = np.ones(100 * MIB, np.uint8)
    assert meter.now_bytes == pytest.approx(block.nbytes, rel=0.05)
    del block
    trim_heap(collect=True)
    assert meter.now_bytes < 10 * MIB
    assert meter.peak_bytes == pytest.approx(100 * MIB, rel=0.05)


def test_a_peak_between_two_looks_is_sampled(meter):
    block = np.ones(100 * MIB, np.uint8)
    time.sleep(0.2)
    del block
    usage = meter.lap()
    assert usage.peak_bytes == pytest.approx(100 * MIB, rel=0.05)
    if usage.high_water_bytes is not None:
        assert usage.high_water_bytes >= 0.95 * usage.peak_bytes


def test_a_lap_forgets_the_last_peak_but_not_the_start(meter):
    kept = np.ones(64 * MIB, np.uint8)  # large enough to be no reused piece of the heap
    block = np.ones(100 * MIB, np.uint8)
    meter.lap()
    del block
    meter.lap()
    assert meter.lap().peak_bytes == pytest.approx(kept.nbytes, rel=0.1)


def test_live_bytes_of_a_convolution(capfd):
    """The output, and the output of what comes before it; not the input, which was there."""
    image, kernel = torch.ones(1, 8, 256, 256), torch.ones(8, 8, 3, 3)

    def work():
        with torch.inference_mode():
            F.conv2d(image * 2, kernel, padding=1)

    work()
    expected = 2 * image.nbytes
    # The library's scratch comes on top: reordered weights, or maps in its own layout.
    assert expected <= live_peak_bytes(work) <= 3 * expected
    assert capfd.readouterr().err == ""


def test_live_bytes_are_those_alive_at_once():
    def work():
        for _ in range(5):
            torch.ones(MIB)  # 4 MiB each, one at a time
        torch.ones(MIB) + torch.ones(MIB)

    assert live_peak_bytes(work) == pytest.approx(12 * MIB, rel=0.01)


def test_resident_bytes_of_a_call():
    def work():
        block = np.ones(64 * MIB, np.uint8)
        time.sleep(0.02)
        del block

    assert resident_peak_bytes(work) == pytest.approx(64 * MIB, rel=0.1)


def test_the_machine_has_memory():
    assert 0 < available_host_bytes() <= total_host_bytes()


def test_what_is_loaded_apart_does_not_count(meter):
    with meter.apart():
        library = np.ones(80 * MIB, np.uint8)
    assert meter.now_bytes < 10 * MIB
    block = np.ones(40 * MIB, np.uint8)
    usage = meter.lap()
    assert usage.peak_bytes == pytest.approx(40 * MIB, rel=0.1)
    assert usage.high_water_bytes == pytest.approx(40 * MIB, rel=0.2)
    assert len(library) > len(block)
