"""Memory events together with other profilers, in other threads, and in backward passes."""

import subprocess
import sys
import threading

import pytest
import torch

from lowtide import LowtideError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.live_peak import live_peak_bytes
from support.region_blocks import block


class TestOtherProfilers:
    def test_one_around_the_call(self):
        with (
            torch.autograd.profiler.profile(use_kineto=True),
            pytest.raises(UsageError, match="another profiler"),
        ):
            live_peak_bytes(lambda: None)

    def test_one_inside_the_call(self):
        def profiled():
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)
            block(2)

        with pytest.raises(LowtideError, match="events were lost"):
            live_peak_bytes(profiled)

    def test_one_inside_nested_calls(self):
        def profiled():
            with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
                block(1)

        def outer():
            with pytest.raises(LowtideError, match="events were lost"):
                live_peak_bytes(profiled)
            with pytest.raises(LowtideError, match="events were lost"):
                live_peak_bytes(lambda: None)

        with pytest.raises(LowtideError, match="events were lost"):
            live_peak_bytes(outer)

    @pytest.fixture(autouse=True)
    def afterwards_all_works_again(self):
        yield
        assert live_peak_bytes(lambda: block(3)) == 3 * MIB


def test_calls_inside_one_another_each_count_their_own():
    def outer():
        first = block(1)
        assert live_peak_bytes(lambda: block(2)) == 2 * MIB
        del first
        assert live_peak_bytes(lambda: block(4)) == 4 * MIB

    assert live_peak_bytes(outer) == 4 * MIB


def test_a_block_from_before_with_the_address_of_an_old_one():
    """Its size is then reported wrongly, and it must not count at all."""
    old = list[torch.UntypedStorage]()
    live_peak_bytes(lambda: old.extend(torch.UntypedStorage(5008) for _ in range(50)))
    addresses = {storage.data_ptr() for storage in old}
    old.clear()
    new = [torch.UntypedStorage(5000) for _ in range(50)]
    if not addresses & {storage.data_ptr() for storage in new}:
        pytest.skip("this heap does not use addresses again")

    def replace():
        new.clear()
        torch.UntypedStorage(300)

    assert live_peak_bytes(replace) == 300


def test_an_error_inside_leaves_no_session_behind():
    with pytest.raises(ZeroDivisionError):
        live_peak_bytes(lambda: 1 / 0)
    assert live_peak_bytes(lambda: block(1)) == MIB


def test_one_thread_at_a_time():
    problems = []

    def other():
        try:
            live_peak_bytes(lambda: None)
        except UsageError as error:
            problems.append(error)

    def work():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        block(1)

    assert live_peak_bytes(work) == MIB
    assert "another thread" in str(problems[0])


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


def test_within_a_backward_pass():
    peaks = []
    backward(lambda: peaks.append(live_peak_bytes(lambda: block(2))))
    assert peaks == [2 * MIB]

    def work():
        with pytest.raises(UsageError, match="backward"):
            backward(lambda: live_peak_bytes(lambda: block(2)))
        block(3)

    assert live_peak_bytes(work) == pytest.approx(3 * MIB, abs=1000)


def test_the_profilers_greetings_are_not_printed(capfd):
    live_peak_bytes(lambda: block(1))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_no_warning_of_the_first_block_from_before():
    code = (
        "import torch; from lowtide.memory.live_peak import live_peak_bytes\n"
        "before = [torch.ones(1) for _ in range(10)]\n"
        "live_peak_bytes(before.clear)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
