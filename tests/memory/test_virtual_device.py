"""A virtual device: what is charged, when it runs out, and that nothing else changes."""

import gc
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_device import VirtualDevice

from lowtide import UsageError
from lowtide.core.units import MIB
from lowtide.memory.allocator import SimulatedOutOfMemory
from lowtide.memory.oom import free_exception, is_out_of_memory


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def test_storages_count_once_and_until_they_go():
    with VirtualDevice() as device:
        first = torch.empty(1000)
        view = first.view(10, 100)[2:].t()
        first.add_(1)
        assert (device.live_bytes, device.allocations) == (4000, 1)
        second = first + 1
        assert (device.live_bytes, device.allocations) == (8000, 2)
        del first
        assert device.live_bytes == 8000  # the view holds it
        del view
        assert device.live_bytes == 4000
        assert device.allocator.allocated == 4096
        del second
        assert (device.live_bytes, device.peak_live_bytes) == (0, 8000)
        assert device.peak_reserved == 2 * MIB


def test_earlier_storages_are_not_charged():
    before, memory = torch.rand(100, 100), np.zeros(1000, np.float32)
    with VirtualDevice() as device:
        before.mul_(2).view(-1)[5:]
        before.contiguous()
        F.dropout(before, training=False)
        shared = torch.from_numpy(memory)
        torch.as_tensor(memory).add_(shared)
        assert device.live_bytes == device.allocations == 0
        made = torch.tensor([1.0, 2.0])
        assert device.live_bytes == 8
        made.resize_(100)
        assert device.live_bytes == 400
        halves = torch.empty(100).split(50)
        assert device.live_bytes == 800
        del made, halves
    assert device.live_bytes == 0


def test_addresses_used_again_are_not_mistaken():
    """By memory of others, which was never charged, at the place of what was."""
    with VirtualDevice() as device:
        for _ in range(50):
            torch.empty(1)
            torch.from_numpy(np.zeros(100, np.float32)).mul_(2)
        assert device.live_bytes == 0
        assert device.allocations == 50


def test_storages_that_outlive_the_device_are_released_later():
    with VirtualDevice() as device:
        kept = torch.empty(1000)
    other = torch.empty(1000)
    assert device.live_bytes == 4000
    del kept, other
    assert (device.live_bytes, device.allocator.allocated) == (0, 0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_runs_give_the_same_values_and_ask_for_the_same(mode):
    net, x = small_net(), torch.rand(2, 3, 20, 20)
    with mode():
        alone = net(x)
        with VirtualDevice() as device:
            result = net(x)
            assert torch.equal(result, alone)
    # Two convolutions and the shuffle; the activation works in place.
    maps = [2 * channels * 400 * 4 for channels in (8, 12, 12)]
    assert device.allocations == 3
    assert device.peak_live_bytes >= maps[1] + maps[2]


def test_the_parts_of_composite_operators_are_seen_in_inference_mode():
    query = torch.rand(1, 2, 64, 16)
    mask = torch.zeros(64, 64)
    peaks = []
    for mode in (torch.no_grad, torch.inference_mode):
        with (
            mode(),
            VirtualDevice() as device,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            F.scaled_dot_product_attention(query, query, query, mask)
        peaks.append(device.peak_live_bytes)
    assert peaks[0] == peaks[1] > 2 * 64 * 64 * 4  # the scores are among them


def losses(net, device=None, steps=3, recompute=False):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    seen = []
    for _ in range(steps):
        x = torch.rand(2, 3, 16, 16)
        y = checkpoint(net, x, use_reentrant=False) if recompute else net(x)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if device is not None:
            seen.append(device.live_bytes)
    return seen


def test_training_is_followed_through_backward_and_optimizer():
    alone = losses(small_net())
    net = small_net()
    with VirtualDevice() as device:
        seen = losses(net, device)
    assert seen[::2] == alone
    # Forward, backward and the optimizer's two moments of each weight.
    assert device.allocations > 3 * 20
    weights = sum(p.nbytes for p in net.parameters())
    assert seen[1] == seen[3] == seen[5] >= 2 * weights  # a steady state, the moments included
    gc.collect()
    assert device.live_bytes == 0
    with VirtualDevice() as frugal:
        assert losses(small_net(), recompute=True) == alone
    assert frugal.allocations > device.allocations
    assert is_out_of_memory(training_that_fails(device.peak_reserved - 1))


def training_that_fails(capacity):
    net = small_net()
    with VirtualDevice(capacity), pytest.raises(SimulatedOutOfMemory) as caught:
        losses(net)
    return caught.value


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_the_numbered_allocation_fails_and_leaves_nothing(number):
    net, x = small_net(), torch.rand(1, 3, 16, 16)

    def run():
        loss = net(x).square().mean()
        loss.backward()

    with VirtualDevice(fail_at=number) as device:
        try:
            run()
        except torch.OutOfMemoryError as error:
            failure = error
        assert f"allocation {number} is listed in fail_at" in str(failure)
        assert device.allocations == number + 1
        free_exception(failure, "cpu")
        for parameter in net.parameters():
            parameter.grad = None
        assert device.live_bytes == 0
        run()  # the fault does not come again


def test_several_allocations_may_fail():
    with VirtualDevice(fail_at={1, 2}) as device:
        held, failed = [], []
        for number in range(4):
            try:
                held.append(torch.empty(256))
            except SimulatedOutOfMemory:
                failed.append(number)
        assert (failed, len(held), device.live_bytes, device.allocations) == ([1, 2], 2, 2048, 4)


def tensors_alive():
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def test_refused_storages_are_neither_charged_nor_kept():
    """Not even the error's own traceback holds the result."""
    with VirtualDevice(2 * MIB) as device:
        held = torch.empty(MIB, dtype=torch.uint8)
        before = {id(tensor) for tensor in tensors_alive()}
        with pytest.raises(SimulatedOutOfMemory, match=r"of 2\.00 MiB reserved") as caught:
            held.repeat(3)
        assert (device.live_bytes, device.allocator.allocated) == (MIB, MIB)
        assert [t.shape for t in tensors_alive() if id(t) not in before] == []
        assert caught.value.requested == 3 * MIB
        small = torch.empty(10, dtype=torch.uint8)
        with pytest.raises(SimulatedOutOfMemory) as caught:
            small.resize_(2 * MIB)
        assert device.live_bytes == MIB + 10  # an argument, as large as it was
        free_exception(caught.value, "cpu")
        del small
        assert device.live_bytes == MIB


def test_results_of_several_tensors_are_refused_together():
    with VirtualDevice(fail_at=2) as device:
        x = torch.rand(100)
        with pytest.raises(SimulatedOutOfMemory):
            torch.sort(x)  # its values are the second storage, its indices the third
        assert device.live_bytes == 400


def test_capacity_counts_what_the_allocator_reserves():
    """Fragments that fit nothing fail a request that the free bytes would allow."""
    with VirtualDevice(60 * MIB) as device:
        parts = [torch.empty(20 * MIB, dtype=torch.uint8) for _ in range(3)]
        thirds = [torch.empty(0)]
        parts[1] = thirds[0]
        small = torch.empty(12 * MIB, dtype=torch.uint8)
        with pytest.raises(SimulatedOutOfMemory):
            torch.empty(9 * MIB, dtype=torch.uint8)
        assert device.live_bytes == 52 * MIB
        del small
        parts.append(torch.empty(9 * MIB, dtype=torch.uint8))
    assert device.peak_reserved == 60 * MIB


def test_devices_do_not_nest_but_can_be_entered_again():
    device = VirtualDevice()
    with device:
        kept = torch.empty(1000)
        for inner in (device, VirtualDevice()):
            with pytest.raises(UsageError, match="already active"):
                inner.__enter__()
    with device:
        assert device.live_bytes == device.allocations == 0
        torch.empty(10)
        assert device.allocations == 1
    assert kept.numel() == 1000


def test_other_threads_are_not_followed_but_may_let_go():
    held = []
    with VirtualDevice() as device:
        worker = threading.Thread(target=lambda: held.append(torch.empty(1000)))
        worker.start()
        worker.join()
        assert device.allocations == 0
        held[0] = torch.empty(500)
        worker = threading.Thread(target=held.clear)
        worker.start()
        worker.join()
        assert device.live_bytes == 0
        assert device.peak_live_bytes == 2000
