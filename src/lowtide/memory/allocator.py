"""Simulation of PyTorch's CUDA caching allocator, without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` in
pytorch/pytorch (the ``native`` backend): requests are rounded to 512 bytes and served from the
smallest free block that fits, of the same stream and of the same of two size classes. The remainder
of a block can be used by others; freed blocks are merged with their free neighbors and cached.
Memory is returned to the device only when the device has no more.

Not modeled: private pools of CUDA graphs, settings other than PyTorch's defaults (expandable
segments among them), and the ``cudaMallocAsync`` backend, which is another allocator.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable

import torch

from lowtide.core.units import MIB, format_bytes

_MIN_BLOCK = 512  # the smallest block, of which all are multiples
_SMALL_SIZE = MIB  # the largest request that shares a small segment
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB  # requests from 1 to 10 MiB share one
_MIN_LARGE_SEGMENT = 10 * MIB  # from here on a request gets its own segment, in steps of
_LARGE_SEGMENT_STEP = 2 * MIB


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """Out-of-memory error of the simulated device, a `torch.OutOfMemoryError`.

    ``requested``, ``reserved`` and ``capacity`` are bytes; ``capacity`` is None for an unlimited
    device, which only fails by fault injection.
    """

    def __init__(
        self, message: str, *, requested: int = 0, reserved: int = 0, capacity: int | None = None
    ) -> None:
        super().__init__(message)
        self.requested, self.reserved, self.capacity = requested, reserved, capacity


class MemoryBlock:
    """An address range, linked to its neighbors in the same segment.

    ``in_use`` until its free is completed.
    """

    __slots__ = ("address", "in_use", "next", "pool", "prev", "size")

    def __init__(self, pool: BlockPool, address: int, size: int) -> None:
        self.pool, self.address, self.size, self.in_use = pool, address, size, False
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def link(self, before: MemoryBlock | None, after: MemoryBlock | None) -> None:
        """Link this block between two neighbors."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class BlockPool:
    """Unused blocks of one stream and one size class, ``free``: by (size, address)."""

    __slots__ = ("free", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, MemoryBlock]] = []

    def insert(self, block: MemoryBlock) -> None:
        """Add an unused block to the pool."""
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        """Remove a block from the pool, before it changes or is released."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def lower_bound(self, size: int) -> int:
        """Return the index in ``free`` of the smallest block of at least ``size`` bytes."""
        return bisect_left(self.free, (size,))

    def merge(self, block: MemoryBlock) -> None:
        """Merge ``block``, which is not in the pool now, with its unused neighbors."""
        before, after = block.prev, block.next
        if before is not None and not before.in_use:
            self.remove(before)
            block.address, block.size = before.address, block.size + before.size
            block.link(before.prev, after)
        if after is not None and not after.in_use:
            self.remove(after)
            block.size += after.size
            block.link(block.prev, after.next)

    def split(self, block: MemoryBlock, size: int) -> MemoryBlock:
        """Shorten ``block`` to ``size`` bytes; returns the rest, not in the pool yet."""
        rest = MemoryBlock(self, block.address + size, block.size - size)
        rest.link(block, block.next)
        block.size = size
        return rest


class SimulatedAllocator:
    """Simulated CUDA caching allocator of one device. All sizes are bytes.

    ``capacity`` is the most that can be reserved at once, None for a device that never runs out.
    ``allocated`` counts allocated blocks at their full size, ``active`` also freed ones that
    another stream still uses, and ``reserved`` all that is allocated or cached.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.active = self.peak_allocated = 0
        self.reserved = self.peak_reserved = self._next_address = 0
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._used: dict[int, MemoryBlock] = {}
        self._pending_frees: dict[int, MemoryBlock] = {}
        self._handles = itertools.count()

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block for ``size`` bytes on ``stream``; returns a handle for `free`.

        Raises:
            SimulatedOutOfMemory: if there is no room even after cached segments are released.
            ValueError: for sizes below 1.
        """
        if size < 1:
            raise ValueError(f"{size} bytes cannot be allocated")
        rounded = -(-size // _MIN_BLOCK) * _MIN_BLOCK
        pool = self._pool(stream, rounded)
        block = self._take_free_block(pool, rounded) or self._allocate_block(pool, rounded)
        if block is None:
            raise self.out_of_memory_error(size)
        if self._should_split(block, rounded):
            pool.insert(pool.split(block, rounded))
        block.in_use = True
        handle = next(self._handles)
        self._used[handle] = block
        self.active += block.size
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return handle

    def free(self, handle: int) -> None:
        """Return a block to the cache."""
        self.request_free(handle)
        self.complete_free(handle)

    def request_free(self, handle: int) -> None:
        """Free a block that another stream still uses: active, but not allocated."""
        block = self._pending_frees[handle] = self._used.pop(handle)
        self.allocated -= block.size

    def complete_free(self, handle: int) -> None:
        """Complete a `request_free`, once the other stream is done with the block.

        Does nothing if the block was already released to make room.
        """
        block = self._pending_frees.pop(handle, None)
        if block is not None:
            self.active -= block.size
            block.in_use = False
            block.pool.merge(block)
            block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release all unused segments to the device."""
        for handle in list(self._pending_frees):
            self.complete_free(handle)
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def out_of_memory_error(self, size: int, detail: str = "") -> SimulatedOutOfMemory:
        """Return (not raise) the out-of-memory error for a request of ``size`` bytes."""
        of = "" if self.capacity is None else f" of {format_bytes(self.capacity)}"
        return SimulatedOutOfMemory(
            f"the simulated device is out of memory: {format_bytes(size)} requested,"
            f" {format_bytes(self.reserved)}{of} reserved{detail}",
            requested=size,
            reserved=self.reserved,
            capacity=self.capacity,
        )

    def _pool(self, stream: int, size: int) -> BlockPool:
        key = stream, size <= _SMALL_SIZE
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BlockPool(small=key[1])
        return pool

    def _take_free_block(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Remove and return the smallest cached block that fits, or None."""
        index = pool.lower_bound(size)
        return None if index == len(pool.free) else pool.free.pop(index)[2]

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        rest = block.size - size
        return rest >= _MIN_BLOCK if block.pool.small else rest > _SMALL_SIZE

    def _allocate_block(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Reserve memory, releasing cached blocks if needed; None if that fails."""
        block = self._allocate_segment(pool, size)
        if block is None:
            self.empty_cache()
            block = self._allocate_segment(pool, size)
        return block

    def _allocate_segment(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Reserve a new segment if the capacity allows."""
        if size <= _SMALL_SIZE:
            segment_size = _SMALL_SEGMENT
        elif size < _MIN_LARGE_SEGMENT:
            segment_size = _LARGE_SEGMENT
        else:
            segment_size = -(-size // _LARGE_SEGMENT_STEP) * _LARGE_SEGMENT_STEP
        if self.capacity is not None and self.reserved + segment_size > self.capacity:
            return None
        self.reserved += segment_size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = MemoryBlock(pool, self._next_address, segment_size)
        self._next_address += segment_size
        return block


def replay_requests(events: Iterable[tuple[int, int]], allocator: SimulatedAllocator) -> None:
    """Replay a run's requests, (storage number, bytes) in order, on ``allocator``.

    Positive bytes allocate, negative bytes free; a number may be reused once it is freed. Storages
    that are never freed stay allocated.

    Raises:
        SimulatedOutOfMemory: if the device has no room.
        KeyError: for a free without an allocation.
    """
    handles: dict[int, int] = {}
    for storage, size in events:
        if size > 0:
            handles[storage] = allocator.allocate(size)
        elif size < 0:
            allocator.free(handles.pop(storage))
