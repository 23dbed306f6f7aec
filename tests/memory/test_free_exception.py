"""What a caught failure keeps alive, in bytes, and that releasing it leaves none of them."""

import gc

import pytest
import torch
from virtual_device import VirtualDevice

from lowtide.memory.allocator import SimulatedOutOfMemory
from lowtide.memory.oom import free_exception

HELD = 3 * 4096


def work(depth=3):
    """Nested calls, each with a tensor of 4096 bytes of its own, the innermost failing."""
    mine = torch.empty(1024)
    if depth > 1:
        return work(depth - 1) + mine
    return mine.repeat(1024)


def plain():
    work()


def chained():
    try:
        work()
    except SimulatedOutOfMemory as first:
        raise RuntimeError("could not go on") from first


def in_the_handler():
    try:
        work()
    except SimulatedOutOfMemory:
        raise RuntimeError("and then this") from None


def suppressed_twice():
    try:
        in_the_handler()
    except RuntimeError as second:
        raise ValueError("at last") from second


def from_elsewhere():
    try:
        work()
    except SimulatedOutOfMemory:
        raise RuntimeError("no cache either") from KeyError("cache")


def caught(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return error
    raise AssertionError("nothing failed")


@pytest.mark.grid(2)
@pytest.mark.parametrize("call", [plain, chained, in_the_handler, suppressed_twice, from_elsewhere])
def test_all_is_held_before_and_nothing_after(call):
    with VirtualDevice(4 << 20) as device:
        failure = caught(call)
        gc.collect()
        assert device.live_bytes == HELD
        free_exception(failure, "cpu")
        assert device.live_bytes == 0
    assert failure.__traceback__ is None


def test_dropping_the_outer_traceback_alone_is_not_enough():
    """The cause has frames of its own; this is what `free_exception` is for."""
    with VirtualDevice(4 << 20) as device:
        failure = caught(chained)
        failure.__traceback__ = None
        gc.collect()
        assert device.live_bytes == HELD
        free_exception(failure, "cpu")
        assert device.live_bytes == 0


def test_a_failure_in_a_backward_pass_holds_no_graph():
    weight = torch.ones(256, requires_grad=True)

    def train():
        hidden = (weight * 2).exp()  # saves its result for the way back
        hidden.square().sum().backward()

    with VirtualDevice() as calm:
        train()
    weight.grad = None
    with VirtualDevice(fail_at=calm.allocations - 2) as device:
        failure = caught(train)
        assert device.live_bytes > 0
        free_exception(failure, "cpu")
        gc.collect()
        weight.grad = None
        assert device.live_bytes == 0


def test_the_room_is_there_for_the_next_try():
    """Outside the handler and after the release, the same request succeeds."""

    def fill():
        held = torch.empty(12 << 20, dtype=torch.uint8)
        return held, torch.empty(12 << 20, dtype=torch.uint8)

    with VirtualDevice(20 << 20):
        failure = caught(fill)
        assert isinstance(caught(lambda: torch.empty(12 << 20, dtype=torch.uint8)), RuntimeError)
        free_exception(failure, "cpu")
        assert torch.empty(12 << 20, dtype=torch.uint8).nbytes == 12 << 20
