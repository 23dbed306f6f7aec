"""Blocks, segments and pools of the simulated caching allocator.

After ``c10/cuda/CUDACachingAllocator.cpp`` in pytorch/pytorch; sizes and addresses in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort

# Alignment of device addresses, and smallest block.
MIN_BLOCK = 512
# Addresses without memory mapped to them are free, and there are more than can be used.
UNLIMITED = 1 << 50


class SimulatedDevice:
    """Reserved bytes and used address ranges of a simulated device.

    ``capacity`` is the most that can be reserved at once, None for no limit.
    """

    __slots__ = ("_next", "capacity", "peak", "reserved")

    def __init__(self, capacity: int | None) -> None:
        self.capacity, self.reserved, self.peak, self._next = capacity, 0, 0, 0

    def fits(self, size: int) -> bool:
        """Return whether ``size`` more bytes can be reserved."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def reserve(self, size: int) -> None:
        """Reserve ``size`` more bytes."""
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def reserve_addresses(self, size: int, step: int) -> int:
        """Return the start of an unused address range, a multiple of ``step``."""
        start = -(-self._next // step) * step
        self._next = start + size
        return start


class ExpandableSegment:
    """Expandable segment: an address range from ``base``, mapped to memory in pages."""

    __slots__ = ("base", "page")

    def __init__(self, base: int, page: int) -> None:
        self.base, self.page = base, page


class MemoryBlock:
    """An address range, linked to its neighbors in the same segment.

    ``in_use`` until its free is completed; ``mapped`` if memory is mapped to the addresses (always,
    outside expandable segments).
    """

    __slots__ = ("address", "in_use", "mapped", "next", "pool", "prev", "segment", "size")

    def __init__(
        self, pool: BlockPool, address: int, size: int, segment: ExpandableSegment | None = None
    ) -> None:
        self.pool, self.address, self.size, self.segment = pool, address, size, segment
        self.in_use, self.mapped = False, True
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def link(self, before: MemoryBlock | None, after: MemoryBlock | None) -> None:
        """Link this block between two neighbors."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    @property
    def growable_size(self) -> int:
        """Size of the block including an unmapped block after it, into which it can grow."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


class BlockPool:
    """Unused blocks of one stream and one size class.

    ``free`` is sorted by (size, address), ``unmapped`` by address.
    """

    __slots__ = ("free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []

    def insert(self, block: MemoryBlock) -> None:
        """Add an unused block to the pool."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        """Remove a block from the pool, before it changes or is released."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def lower_bound(self, size: int) -> int:
        """Return the index in ``free`` of the smallest block of at least ``size`` bytes."""
        return bisect_left(self.free, (size,))

    def merge(self, block: MemoryBlock) -> None:
        """Merge ``block``, which is not in the pool now, with its unused neighbors.

        Mapped blocks merge with mapped neighbors, unmapped ones with unmapped.
        """
        before, after = block.prev, block.next
        if before is not None and not before.in_use and before.mapped == block.mapped:
            self.remove(before)
            block.address, block.size = before.address, block.size + before.size
            block.link(before.prev, after)
        if after is not None and not after.in_use and after.mapped == block.mapped:
            self.remove(after)
            block.size += after.size
            block.link(block.prev, after.next)

    def split(self, block: MemoryBlock, size: int) -> MemoryBlock:
        """Shorten ``block`` to ``size`` bytes; returns the rest, not in the pool yet."""
        rest = MemoryBlock(self, block.address + size, block.size - size, block.segment)
        rest.mapped = block.mapped
        rest.link(block, block.next)
        block.size = size
        return rest


def release_segment(device: SimulatedDevice, block: MemoryBlock) -> None:
    """Release a segment that is one free block to the device."""
    block.pool.remove(block)
    device.reserved -= block.size


def map_segment(
    device: SimulatedDevice, pool: BlockPool, size: int, page: int
) -> MemoryBlock | None:
    """Return a block of at least ``size`` mapped bytes, or None without room.

    The block is removed from the pool. Pages mapped before the room ran out stay in the pool.
    """
    block = _unused_addresses(device, pool, size, page)
    if not block.mapped and not _map(device, block, min(block.size, size), page):
        return None
    while block.size < size:
        after = block.next
        if after is None or not _map(device, after, min(size - block.size, after.size), page):
            return None
        block = after  # it was merged with the block before it
    pool.remove(block)
    return block


def _unused_addresses(
    device: SimulatedDevice, pool: BlockPool, size: int, page: int
) -> MemoryBlock:
    """Return the start of the lowest unused range of ``size`` bytes, or a new segment.

    The range consists of free and unmapped blocks.
    """
    for _, block in pool.unmapped:
        before = block.prev
        start = before if before is not None and not before.in_use else block
        available, part = 0, start
        while part is not None and not part.in_use and available < size:
            available, part = available + part.size, part.next
        if available >= size:
            return start
    # PyTorch reserves an eighth more addresses than the device has, to move pages to the end.
    reach = UNLIMITED if device.capacity is None else device.capacity * 9 // 8
    length = -(-max(reach, size) // page) * page
    segment = ExpandableSegment(device.reserve_addresses(length, page), page)
    block = MemoryBlock(pool, segment.base, length, segment)
    block.mapped = False
    pool.insert(block)
    return block


def _map(device: SimulatedDevice, block: MemoryBlock, size: int, page: int) -> bool:
    """Map the first ``size`` bytes of a block, in whole pages; False without room."""
    pool, mapped = block.pool, -(-size // page) * page
    if not device.fits(mapped):
        return False
    pool.remove(block)
    if mapped < block.size:
        pool.insert(pool.split(block, mapped))
    block.mapped = True
    pool.merge(block)
    pool.insert(block)
    device.reserve(mapped)
    return True


def unmap_block(device: SimulatedDevice, block: MemoryBlock, segment: ExpandableSegment) -> None:
    """Unmap the whole pages of a free block."""
    page, pool = segment.page, block.pool
    start = segment.base + -(-(block.address - segment.base) // page) * page
    end = segment.base + (block.address + block.size - segment.base) // page * page
    if start >= end:
        return
    pool.remove(block)
    if start > block.address:
        front, block = block, pool.split(block, start - block.address)
        pool.insert(front)
    if end < block.address + block.size:
        pool.insert(pool.split(block, end - block.address))
    block.mapped = False
    pool.merge(block)
    device.reserved -= end - start
    if block.prev is not None or block.next is not None:
        pool.insert(block)  # otherwise the segment is unused, and is released as a whole
