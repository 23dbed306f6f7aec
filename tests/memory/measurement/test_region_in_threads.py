"""Regions together with other profilers, in other threads, and in backward passes."""

import subprocess
import sys
import threading

import pytest
import torch

from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.measurement.live_peak import live_peak_bytes
from lowtide.memory.measurement.region import measure
from support.region_blocks import block


class TestOtherProfilers:
    def test_one_around_the_region(self):
        with (
            torch.autograd.profiler.profile(use_kineto=True),
            pytest.raises(UsageError, match="another profiler"),
            measure("cpu"),
        ):
            pass

    def test_one_inside_the_region(self):
        with pytest.raises(LowtideError, match="events were lost"), measure("cpu") as region:
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)
            block(2)
        with pytest.raises(UsageError, match="has no result"):
            _ = region.usage

    def test_one_inside_nested_regions(self):
        with pytest.raises(LowtideError, match="events were lost"), measure("cpu"):
            inner = measure("cpu")
            inner.__enter__()
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)
            with pytest.raises(LowtideError, match="events were lost"):
                inner.__exit__(None, None, None)

    def test_other_ways_do_not_mind(self):
        with torch.autograd.profiler.profile(use_kineto=True), measure("cpu", "storages") as region:
            block(1)
        assert region.peak_bytes == MIB

    @pytest.fixture(autouse=True)
    def afterwards_all_works_again(self):
        yield
        assert live_peak_bytes(lambda: block(3)) == 3 * MIB


def test_events_of_one_thread_at_a_time():
    problems = []

    def other():
        try:
            live_peak_bytes(lambda: None)
        except UsageError as error:
            problems.append(error)

    with measure("cpu") as region:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        kept = block(1)
    assert "one thread" in str(problems[0])
    assert region.peak_bytes == kept.nbytes


def test_a_region_left_in_another_thread_does_not_block_the_next():
    meter = measure("cpu")
    region = meter.__enter__()
    problems = []

    def leave():
        try:
            region._end()
        except UsageError as error:
            problems.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "one thread" in str(problems[0])
    assert live_peak_bytes(lambda: block(2)) == 2 * MIB
    with pytest.raises(LowtideError, match="one thread"):
        meter.__exit__(None, None, None)


class Inside(torch.autograd.Function):
    """Calls something in the backward pass."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def backward(call) -> None:
    Inside.apply(torch.ones(2, requires_grad=True), call).sum().backward()


def test_a_region_within_a_backward_pass():
    peaks = []
    backward(lambda: peaks.append(live_peak_bytes(lambda: block(2))))
    assert peaks == [2 * MIB]
    with measure("cpu") as region:
        with pytest.raises(UsageError, match="backward"):
            backward(lambda: live_peak_bytes(lambda: block(2)))
        kept = block(3)
    assert region.peak_bytes == pytest.approx(kept.nbytes, abs=1000)


def test_lowtides_own_probes_run_inside_a_region():
    with measure("cpu") as region:
        assert live_peak_bytes(lambda: block(2)) == 2 * MIB
        kept = block(1)
    assert (region.peak_bytes, region.retained_bytes) == (2 * MIB, kept.nbytes)


def test_the_profilers_greetings_are_not_printed_and_all_else_is(capfd):
    with measure("cpu"):
        print("from inside", file=sys.stderr)
    assert capfd.readouterr().err == "from inside\n"


@pytest.mark.slow
def test_no_warning_of_the_first_block_from_before():
    code = (
        "import torch; from lowtide.memory.measurement.region import measure\n"
        "before = [torch.ones(1) for _ in range(10)]\n"
        "with measure('cpu'): del before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
