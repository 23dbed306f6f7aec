"""The simulated caching allocator in long runs: right throughout, and what order does to it."""

import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from virtual_device import VirtualDevice

from lowtide.core.units import MIB
from lowtide.memory.allocator import SimulatedAllocator, SimulatedOutOfMemory


class PlainAllocator:
    """The same rules for one stream and endless memory, as plainly as can be."""

    def __init__(self):
        self.segments = []  # lists of [size, used]
        self.reserved = 0

    def allocate(self, size):
        size = -(-size // 512) * 512
        small = size <= MIB
        options = [
            (part[0], number, place)
            for number, (kind, parts) in enumerate(self.segments)
            if kind == small
            for place, part in enumerate(parts)
            if not part[1] and part[0] >= size
        ]
        if options:
            _, number, place = min(options)
        else:
            whole = 2 if small else 20 if size < 10 * MIB else -(-size // (2 * MIB)) * 2
            self.segments.append((small, [[whole * MIB, False]]))
            self.reserved += whole * MIB
            number, place = len(self.segments) - 1, 0
        parts = self.segments[number][1]
        part = parts[place]
        rest = part[0] - size
        if rest >= 512 if small else rest > MIB:
            part[0] = size
            parts.insert(place + 1, [rest, False])
        part[1] = True
        return parts, part

    def free(self, handle):
        parts, part = handle
        part[1] = False
        joined = []
        for size, used in parts:
            if joined and not used and not joined[-1][1]:
                joined[-1][0] += size
            else:
                joined.append([size, used])
        # Parts are told apart by identity, so those in use stay the same lists.
        held = iter([part for part in parts if part[1]])
        parts[:] = [next(held) if part[1] else part for part in joined]


def test_equals_a_plain_implementation():
    chance = random.Random(5)
    fast, plain, held = SimulatedAllocator(), PlainAllocator(), []
    for _ in range(3000):
        if held and chance.random() < 0.4 + len(held) / 200:
            first, second = held.pop(chance.randrange(len(held)))
            fast.free(first)
            plain.free(second)
        else:
            size = int(2 ** chance.uniform(8, 25.5))
            held.append((fast.allocate(size), plain.allocate(size)))
        assert fast.reserved == plain.reserved


def test_whatever_happens_blocks_are_apart_and_everything_comes_back():
    chance = random.Random(7)
    allocator = SimulatedAllocator(300 * MIB)
    held, failures = [], 0
    for _ in range(4000):
        if held and chance.random() < 0.4:
            allocator.free(held.pop(chance.randrange(len(held))))
        else:
            try:
                size, stream = int(2 ** chance.uniform(8, 25)), chance.randrange(2)
                held.append(allocator.allocate(size, stream))
            except SimulatedOutOfMemory:
                failures += 1
        assert allocator.allocated <= allocator.reserved <= 300 * MIB
    assert failures > 20
    used = sorted((block.address, block.size) for block in allocator._used.values())
    ends = [address + size for address, size in used]
    assert all(end <= start for end, (start, _) in zip(ends[:-1], used[1:], strict=True))
    assert sum(size for _, size in used) == allocator.allocated
    for handle in held:
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.active, allocator.reserved) == (0, 0, 0)


class Trunk(nn.Module):
    """A residual trunk as upscalers have, ×4."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.tail = nn.Conv2d(width, 48, 3, padding=1)

    def forward(self, x):
        x = self.head(x)
        for block in self.body:
            x = x + block(x)
        return nn.functional.pixel_shuffle(self.tail(x), 4)


@pytest.fixture(scope="module")
def ratio():
    """Bytes reserved over bytes alive at the peak, for (side, batch) inputs in that order."""
    with FakeTensorMode():
        trunk = Trunk()

    def of(inputs):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            device = VirtualDevice()
            with device:
                for side, batch in inputs:
                    trunk(torch.empty(batch, 3, side, side))
        return device.peak_reserved / device.peak_live_bytes

    return of


SIDES = range(128, 257, 16)


def test_growing_tiles_reserve_more_than_shrinking_ones(ratio):
    growing = ratio([(side, 1) for side in SIDES])
    shrinking = ratio([(side, 1) for side in reversed(SIDES)])
    assert growing > 1.4 * shrinking


def test_largest_batches_first_reserve_less(ratio):
    rising = ratio([(128, batch) for batch in (1, 2, 3, 4, 3, 2, 1, 4)])
    assert ratio([(128, batch) for batch in (4, 4, 3, 3, 2, 2, 1, 1)]) < 0.8 * rising


def test_equal_tiles_reserve_no_more_than_one(ratio):
    assert ratio([(192, 1)] * 20) == ratio([(192, 1)])
