"""Simulation of PyTorch's CUDA caching allocator, without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` in
pytorch/pytorch (the ``native`` backend): requests are rounded to 512 bytes and served from the
smallest free block that fits, of the same stream and of the same of two size classes. The remainder
of a block can be used by others; freed blocks are merged with their free neighbors and cached.
Memory is returned to the device only when the device has no more.

Not modeled: private pools of CUDA graphs, ``garbage_collection_threshold``, and the
``cudaMallocAsync`` backend, which is another allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from lowtide.core.errors import UsageError
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.simulation.block_pool import (
    MIN_BLOCK,
    UNLIMITED,
    BlockPool,
    MemoryBlock,
    SimulatedDevice,
    map_segment,
    release_segment,
    unmap_block,
)

_SMALL_SIZE = MIB  # the largest request that shares a small segment
_SMALL_SEGMENT = 2 * MIB
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


class CachingAllocator:
    """Simulated CUDA caching allocator of one device. All sizes are bytes.

    ``capacity`` is the most that can be reserved at once, None for a device that never runs out.
    The keywords are PyTorch's settings of the same names (``PYTORCH_ALLOC_CONF``), some of which
    are in MiB there: free blocks of ``max_split_size`` or more are neither split nor given to
    requests smaller than that or smaller than the block by ``max_non_split_rounding`` or more;
    ``large_segment_size`` is the segment that requests from 1 to 10 MiB share, and the page of
    large expandable segments; ``roundup_power2_divisions`` above 1 rounds requests up to that
    number of steps between powers of two.

    ``allocated`` counts allocated blocks at their full size; ``active`` also freed ones that
    another stream still uses.

    Raises:
        UsageError: for settings that PyTorch would refuse.
    """

    def __init__(
        self,
        capacity: int | None = None,
        *,
        expandable_segments: bool = False,
        max_split_size: int | None = None,
        max_non_split_rounding: int = 20 * MIB,
        large_segment_size: int = 20 * MIB,
        roundup_power2_divisions: int = 0,
    ) -> None:
        if max_split_size is not None and max_split_size < large_segment_size:
            raise UsageError(
                f"max_split_size {max_split_size} is less than large_segment_size"
                f" {large_segment_size}"
            )
        if roundup_power2_divisions & (roundup_power2_divisions - 1):
            raise UsageError(
                f"roundup_power2_divisions {roundup_power2_divisions} is not a power of two"
            )
        self.expandable_segments = expandable_segments
        self.allocated = self.active = self.peak_allocated = 0
        self._device = SimulatedDevice(capacity)
        self._max_split = UNLIMITED if max_split_size is None else max_split_size
        self._max_non_split_rounding, self._large_segment = (
            max_non_split_rounding,
            large_segment_size,
        )
        self._divisions = roundup_power2_divisions
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._used: dict[int, MemoryBlock] = {}
        self._pending_frees: dict[int, MemoryBlock] = {}
        self._handles = itertools.count()

    @property
    def capacity(self) -> int | None:
        """The most bytes that can be reserved at once; None without a limit."""
        return self._device.capacity

    @property
    def reserved(self) -> int:
        """Bytes reserved on the device: allocated and cached."""
        return self._device.reserved

    @property
    def peak_reserved(self) -> int:
        """Peak of the reserved bytes so far."""
        return self._device.peak

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block for ``size`` bytes on ``stream``; returns a handle for `free`.

        Raises:
            SimulatedOutOfMemory: if there is no room even after cached segments are released.
            ValueError: for sizes below 1.
        """
        if size < 1:
            raise ValueError(f"{size} bytes cannot be allocated")
        rounded = self.round_size(size)
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
        """Release all unused segments, or pages of expandable ones, to the device."""
        for handle in list(self._pending_frees):
            self.complete_free(handle)
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.segment is not None:
                    unmap_block(self._device, block, block.segment)
                elif block.prev is None and block.next is None:
                    release_segment(self._device, block)

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

    def round_size(self, size: int) -> int:
        """Return the block bytes that a request of ``size`` bytes takes."""
        divisions = self._divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            # The interval between two powers of two has this number of steps; only its lower end
            # counts.
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def _pool(self, stream: int, size: int) -> BlockPool:
        key = stream, size <= _SMALL_SIZE
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BlockPool(small=key[1])
        return pool

    def _take_free_block(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Remove and return the smallest cached block that fits, or None."""
        free, index = pool.free, pool.lower_bound(size)
        if index == len(free):
            return None
        if self.expandable_segments:
            # A block that can grow is ranked by its largest possible size, and is kept for others.
            while (
                index + 1 < len(free)
                and free[index + 1][2].growable_size < free[index][2].growable_size
            ):
                index += 1
        block = free[index][2]
        if size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + self._max_non_split_rounding:
            return None
        del free[index]
        return block

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        if block.pool.small or self.expandable_segments:
            return block.size - size >= MIN_BLOCK
        return size < self._max_split and block.size - size > _SMALL_SIZE

    def _allocate_block(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Reserve memory, releasing cached blocks if needed; None if that fails."""
        block = self._allocate_segment(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._allocate_segment(pool, size)
        if block is None:
            self.empty_cache()
            block = self._allocate_segment(pool, size)
        return block

    def _allocate_segment(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Reserve a new segment, or pages of an expandable one, if the capacity allows."""
        if size <= _SMALL_SIZE:
            segment_size = _SMALL_SEGMENT
        elif size < _MIN_LARGE_SEGMENT:
            segment_size = self._large_segment
        else:
            segment_size = -(-size // _LARGE_SEGMENT_STEP) * _LARGE_SEGMENT_STEP
        device = self._device
        if not device.fits(segment_size):
            return None
        if self.expandable_segments:
            return map_segment(
                device, pool, size, _SMALL_SEGMENT if pool.small else self._large_segment
            )
        device.reserve(segment_size)
        return MemoryBlock(
            pool, device.reserve_addresses(segment_size, _LARGE_SEGMENT_STEP), segment_size
        )

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Release oversize blocks until they cover a request; False if too few."""
        target = max(size, self._max_split)
        if self._max_split == UNLIMITED or self.expandable_segments:
            return False
        index = pool.lower_bound(target)
        if index < len(pool.free):
            release_segment(self._device, pool.free[index][2])
            return True
        released = 0
        while released < target and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            release_segment(self._device, pool.free[-1][2])
        return released >= target


def replay_requests(events: Iterable[tuple[int, int]], allocator: CachingAllocator) -> None:
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
