"""What PyTorch's CUDA caching allocator would reserve, simulated without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``
in pytorch/pytorch (the ``native`` backend): requests are rounded to 512 bytes and served from
the smallest free block that fits, of the same stream and of the same of two classes of size.
What is left of a block can be used by others; what is freed is joined with its free neighbors
and kept. Memory goes back to the device only when the device has no more.

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
    ENDLESS,
    MIN_BLOCK,
    BlockPool,
    MemoryBlock,
    SimulatedDevice,
    map_segment,
    release_segment,
    unmap_block,
)

_SMALL = MIB  # the largest request that shares a small segment
_SMALL_SEGMENT = 2 * MIB
_OWN_SEGMENT = 10 * MIB  # from here on a request gets a segment of its own, in steps of
_SEGMENT_STEP = 2 * MIB


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """The simulated device has no room for a request; handled like the error of a real one.

    ``requested``, ``reserved`` and ``capacity`` are bytes; no capacity means an injected fault.
    """

    def __init__(
        self, message: str, *, requested: int = 0, reserved: int = 0, capacity: int | None = None
    ) -> None:
        super().__init__(message)
        self.requested, self.reserved, self.capacity = requested, reserved, capacity


class CachingAllocator:
    """The state of one device's allocator. All sizes are bytes.

    ``capacity`` is what may be reserved at once, None for a device that never runs out. The
    keywords are PyTorch's settings of the same names (``PYTORCH_ALLOC_CONF``), there partly in
    MiB: free blocks of ``max_split_size`` or more are neither split nor given to requests
    smaller than that or smaller than the block by ``max_non_split_rounding`` or more;
    ``large_segment_size`` is the segment that requests from 1 to 10 MiB share, and the page of
    large expandable segments; ``roundup_power2_divisions`` above 1 rounds requests up to that
    many steps between powers of two. Raises `UsageError` for what PyTorch would refuse.

    ``allocated`` counts the blocks that are held, whole as they are; ``active`` also those that
    another stream still works on.
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
            raise UsageError(f"max_split_size {max_split_size} is less than a large segment")
        if roundup_power2_divisions & (roundup_power2_divisions - 1):
            raise UsageError(f"{roundup_power2_divisions} divisions are not a power of two")
        self.expandable_segments = expandable_segments
        self.allocated = self.active = self.peak_allocated = 0
        self._device = SimulatedDevice(capacity)
        self._max_split = ENDLESS if max_split_size is None else max_split_size
        self._rounding, self._large_segment = max_non_split_rounding, large_segment_size
        self._divisions = roundup_power2_divisions
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._used: dict[int, MemoryBlock] = {}
        self._leaving: dict[int, MemoryBlock] = {}
        self._handles = itertools.count()

    @property
    def capacity(self) -> int | None:
        """What may be reserved at once."""
        return self._device.capacity

    @property
    def reserved(self) -> int:
        """Bytes taken from the device: those in use, and those kept for later."""
        return self._device.reserved

    @property
    def peak_reserved(self) -> int:
        """Most bytes reserved so far."""
        return self._device.peak

    def allocate(self, size: int, stream: int = 0) -> int:
        """A block for ``size`` bytes on ``stream``, as a handle for `free`.

        Raises `SimulatedOutOfMemory` where not even the cached segments that could be given
        back make room, and `ValueError` for sizes that no tensor asks for.
        """
        if size < 1:
            raise ValueError(f"{size} bytes cannot be allocated")
        rounded = self.rounded(size)
        pool = self._pool(stream, rounded)
        block = self._cached(pool, rounded) or self._obtained(pool, rounded)
        if block is None:
            raise self.exhausted(size)
        if self._leaves_a_rest(block, rounded):
            pool.put(pool.cut(block, rounded))
        block.in_use = True
        handle = next(self._handles)
        self._used[handle] = block
        self.active += block.size
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return handle

    def free(self, handle: int) -> None:
        """Give a block back to the cache."""
        self.request_free(handle)
        self.complete_free(handle)

    def request_free(self, handle: int) -> None:
        """Give a block up while another stream still works on it: active, but not allocated."""
        block = self._leaving[handle] = self._used.pop(handle)
        self.allocated -= block.size

    def complete_free(self, handle: int) -> None:
        """The other stream is done with a block given up before.

        Does nothing if that was waited for already, to make room.
        """
        block = self._leaving.pop(handle, None)
        if block is not None:
            self.active -= block.size
            block.in_use = False
            block.pool.merge(block)
            block.pool.put(block)

    def empty_cache(self) -> None:
        """Give every segment, or page of an expandable one, that nobody uses to the device."""
        for handle in list(self._leaving):
            self.complete_free(handle)
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.segment is not None:
                    unmap_block(self._device, block, block.segment)
                elif block.prev is None and block.next is None:
                    release_segment(self._device, block)

    def exhausted(self, size: int, why: str = "") -> SimulatedOutOfMemory:
        """The error for a request of ``size`` bytes, not raised."""
        of = "" if self.capacity is None else f" of {format_bytes(self.capacity)}"
        return SimulatedOutOfMemory(
            f"the simulated device is out of memory: {format_bytes(size)} requested,"
            f" {format_bytes(self.reserved)}{of} reserved{why}",
            requested=size,
            reserved=self.reserved,
            capacity=self.capacity,
        )

    def rounded(self, size: int) -> int:
        """The bytes that a request of ``size`` bytes takes of a block."""
        divisions = self._divisions
        if divisions > 1 and size > MIN_BLOCK * divisions:
            # Between two powers of two lie that many steps; only its own power of two counts.
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def _pool(self, stream: int, size: int) -> BlockPool:
        key = stream, size <= _SMALL
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = BlockPool(small=key[1])
        return pool

    def _cached(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """The smallest free block that fits, taken out of the cache."""
        free, index = pool.free, pool.first_of(size)
        if index == len(free):
            return None
        if self.expandable_segments:
            # A block that can grow counts as large as it can get, and is kept for others.
            while index + 1 < len(free) and free[index + 1][2].room < free[index][2].room:
                index += 1
        block = free[index][2]
        if size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + self._rounding:
            return None
        del free[index]
        return block

    def _leaves_a_rest(self, block: MemoryBlock, size: int) -> bool:
        if block.pool.small or self.expandable_segments:
            return block.size - size >= MIN_BLOCK
        return size < self._max_split and block.size - size > _SMALL

    def _obtained(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Memory new to the cache, for which others may be given back; None if that fails."""
        block = self._new(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            block = self._new(pool, size)
        return block

    def _new(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """A new segment, or more of an expandable one, if the capacity allows it."""
        if size <= _SMALL:
            wanted = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            wanted = self._large_segment
        else:
            wanted = -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
        device = self._device
        if not device.fits(wanted):
            return None
        if self.expandable_segments:
            return map_segment(
                device, pool, size, _SMALL_SEGMENT if pool.small else self._large_segment
            )
        device.reserve(wanted)
        return MemoryBlock(pool, device.addresses(wanted, _SEGMENT_STEP), wanted)

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back unsplit blocks that together are as large as a request; False if too few."""
        target = max(size, self._max_split)
        if self._max_split == ENDLESS or self.expandable_segments:
            return False
        index = pool.first_of(target)
        if index < len(pool.free):
            release_segment(self._device, pool.free[index][2])
            return True
        released = 0
        while released < target and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            release_segment(self._device, pool.free[-1][2])
        return released >= target


def replay_requests(events: Iterable[tuple[int, int]], allocator: CachingAllocator) -> None:
    """Let ``allocator`` serve what a run asked for: (storage number, bytes) in order.

    More than zero bytes come, fewer go; a number may come again once it went. What never goes
    stays allocated. Raises `SimulatedOutOfMemory`, and `KeyError` for what goes but never came.
    """
    handles: dict[int, int] = {}
    for storage, size in events:
        if size > 0:
            handles[storage] = allocator.allocate(size)
        elif size < 0:
            allocator.free(handles.pop(storage))
