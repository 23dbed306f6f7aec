"""The simulated caching allocator: PyTorch's rules, one by one."""

import copy
import pickle

import pytest

from lowtide.core.units import KIB, MIB
from lowtide.memory.allocator import (
    SimulatedAllocator,
    SimulatedOutOfMemory,
    replay_requests,
)
from lowtide.memory.oom import is_out_of_memory


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (19 * MIB + 512 * KIB, 20 * MIB, 20 * MIB),  # less than 1 MiB is left, and stays with it
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_rounding_and_segments(size, allocated, reserved):
    allocator = SimulatedAllocator()
    handle = allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    allocator.free(handle)
    assert (allocator.allocated, allocator.active, allocator.reserved) == (0, 0, reserved)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (allocated, reserved)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved) == (0, reserved)


def test_no_tensor_asks_for_nothing():
    with pytest.raises(ValueError, match="0 bytes"):
        SimulatedAllocator().allocate(0)


def test_large_blocks_are_split_only_where_more_than_1_mib_is_left():
    allocator = SimulatedAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(29 * MIB)
    assert allocator.allocated == 30 * MIB
    allocator = SimulatedAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(29 * MIB - 512)
    assert allocator.allocated == 29 * MIB - 512
    allocator.allocate(MIB + 512)  # fits what is left exactly
    assert allocator.reserved == 30 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = SimulatedAllocator()
    handles = [allocator.allocate(size * MIB) for size in (40, 12, 20)]
    for handle in handles:
        allocator.free(handle)
    allocator.allocate(12 * MIB)
    allocator.allocate(20 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 72 * MIB


def test_freed_neighbors_are_one_again():
    allocator = SimulatedAllocator()
    handles = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for index in (0, 2, 1, 3):
        allocator.free(handles[index])
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_segments_that_anyone_uses_are_not_given_back():
    allocator = SimulatedAllocator()
    small, _ = allocator.allocate(512), allocator.allocate(512)
    large = allocator.allocate(64 * MIB)
    allocator.free(small)
    allocator.free(large)
    allocator.empty_cache()
    assert allocator.reserved == 2 * MIB


def test_streams_do_not_share():
    allocator = SimulatedAllocator()
    allocator.free(allocator.allocate(16 * MIB, stream=1))
    allocator.allocate(16 * MIB, stream=2)
    assert allocator.reserved == 32 * MIB
    allocator.allocate(16 * MIB, stream=1)
    assert allocator.reserved == 32 * MIB


def test_a_block_another_stream_works_on_is_active_until_that_is_done():
    allocator = SimulatedAllocator(20 * MIB)
    handle = allocator.allocate(16 * MIB)
    allocator.request_free(handle)
    assert (allocator.allocated, allocator.active) == (0, 16 * MIB)
    allocator.allocate(20 * MIB)  # waits for it, since there is no other room
    allocator.complete_free(handle)
    assert (allocator.allocated, allocator.active, allocator.reserved) == (20 * MIB,) * 3


def test_cached_segments_are_freed_before_anything_fails():
    allocator = SimulatedAllocator(100 * MIB)
    handles = [allocator.allocate(30 * MIB) for _ in range(3)]
    allocator.free(handles[0])
    allocator.free(handles[1])
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 80 * MIB
    assert allocator.peak_reserved == 90 * MIB


def test_running_out_says_what_was_missing_and_changes_nothing():
    allocator = SimulatedAllocator(50 * MIB)
    allocator.allocate(30 * MIB)
    before = allocator.allocated, allocator.active, allocator.reserved
    with pytest.raises(SimulatedOutOfMemory, match=r"30\.0 MiB requested, .* of 50\.0 MiB") as seen:
        allocator.allocate(30 * MIB)
    error = seen.value
    assert (error.requested, error.reserved, error.capacity) == (30 * MIB, before[2], 50 * MIB)
    assert (allocator.allocated, allocator.active, allocator.reserved) == before
    assert is_out_of_memory(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(twin), twin.requested) == (str(error), 30 * MIB)


def test_replaying_a_run():
    allocator = SimulatedAllocator()
    replay_requests([(1, 30 * MIB), (2, 512), (1, -30 * MIB), (3, 0), (1, 20 * MIB)], allocator)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB + 512, 32 * MIB)
    with pytest.raises(KeyError):
        replay_requests([(9, -1)], SimulatedAllocator())
