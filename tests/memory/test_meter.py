"""Measuring memory: what is allocated is seen."""

import pytest
import torch
import torch.nn.functional as F
from subprocess_run import measure_in_subprocess

from lowtide.core.units import MIB
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.meter import CudaMemoryMeter
from lowtide.memory.process_memory import available_host_bytes, total_host_bytes


def run(name):
    """What a function of `meter_runs` returns in a process of its own."""
    return measure_in_subprocess(f"support.meter_runs:{name}").result


def test_an_allocation_is_seen_and_so_is_its_end():
    found = run("an_allocation_and_its_end")
    assert found["there"] == pytest.approx(100 * MIB, rel=0.05)
    assert found["gone"] < 10 * MIB
    assert found["peak"] == pytest.approx(100 * MIB, rel=0.05)


def test_a_peak_between_two_looks_is_sampled():
    found = run("between_two_looks")
    assert found["peak"] == pytest.approx(100 * MIB, rel=0.05)
    if found["high_water"] is not None:
        assert found["high_water"] >= 0.95 * found["peak"]


def test_a_lap_forgets_the_last_peak_but_not_the_start():
    assert run("third_lap") == pytest.approx(64 * MIB, rel=0.1)


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
    assert run("of_a_call") == pytest.approx(64 * MIB, rel=0.1)


def test_the_machine_has_memory():
    assert 0 < available_host_bytes() <= total_host_bytes()


def test_what_is_loaded_before_does_not_count():
    found = run("loaded_before")
    assert found["before"] < 10 * MIB
    assert found["peak"] == pytest.approx(40 * MIB, rel=0.1)
    assert found["high_water"] == pytest.approx(40 * MIB, rel=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_what_a_process_held_on_a_gpu_before_does_not_count():
    def block(mib):
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    held, gone = block(300), block(200)
    del gone
    meter = CudaMemoryMeter("cuda:0")
    meter.start()
    nothing = meter.peak_bytes
    more = block(100)
    assert meter.peak_bytes - nothing == pytest.approx(100 * MIB, abs=4 * MIB)
    assert meter.current_bytes == meter.peak_bytes
    del more, held
