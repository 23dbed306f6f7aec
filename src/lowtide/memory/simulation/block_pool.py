"""Pieces of simulated device memory, and how an allocator keeps and grows what it has of them.

After ``c10/cuda/CUDACachingAllocator.cpp`` in pytorch/pytorch; sizes and addresses in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort

# Device addresses are aligned like this, and no block is smaller.
MIN_BLOCK = 512
# Addresses without memory behind them cost nothing, and there are more than can be used.
ENDLESS = 1 << 50


class SimulatedDevice:
    """How much of a device's memory is reserved, and which addresses were handed out.

    ``capacity`` is what can be reserved at once, None for no limit.
    """

    __slots__ = ("_next", "capacity", "peak", "reserved")

    def __init__(self, capacity: int | None) -> None:
        self.capacity, self.reserved, self.peak, self._next = capacity, 0, 0, 0

    def fits(self, size: int) -> bool:
        """Whether so much more can be reserved."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def reserve(self, size: int) -> None:
        """Take so much more of the memory."""
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def addresses(self, size: int, step: int) -> int:
        """The start of a range never used before, a multiple of ``step``."""
        start = -(-self._next // step) * step
        self._next = start + size
        return start


class ExpandableSegment:
    """An expandable segment: addresses from ``base`` on that get memory in pages."""

    __slots__ = ("base", "page")

    def __init__(self, base: int, page: int) -> None:
        self.base, self.page = base, page


class MemoryBlock:
    """A run of addresses, linked to its neighbors in the same segment.

    ``in_use`` until its release is completed; ``mapped`` if memory stands behind the addresses
    (always, outside expandable segments).
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
        """Put this block between two neighbors."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    @property
    def room(self) -> int:
        """The size it has, or could grow to by mapping the addresses that follow."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


class BlockPool:
    """The blocks of one stream and one class of size that nobody uses.

    ``free`` is in order of (size, address), ``unmapped`` of address.
    """

    __slots__ = ("free", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []

    def put(self, block: MemoryBlock) -> None:
        """Keep a block that nobody uses."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: MemoryBlock) -> None:
        """Forget a block that is kept, before it changes or goes."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def first_of(self, size: int) -> int:
        """Index in ``free`` of the smallest block of at least ``size`` bytes."""
        return bisect_left(self.free, (size,))

    def merge(self, block: MemoryBlock) -> None:
        """Make ``block``, which is not kept now, one with its unused neighbors of its kind."""
        before, after = block.prev, block.next
        if before is not None and not before.in_use and before.mapped == block.mapped:
            self.drop(before)
            block.address, block.size = before.address, block.size + before.size
            block.link(before.prev, after)
        if after is not None and not after.in_use and after.mapped == block.mapped:
            self.drop(after)
            block.size += after.size
            block.link(block.prev, after.next)

    def cut(self, block: MemoryBlock, size: int) -> MemoryBlock:
        """Shorten ``block`` to ``size`` bytes; the rest is returned, and not kept yet."""
        rest = MemoryBlock(self, block.address + size, block.size - size, block.segment)
        rest.mapped = block.mapped
        rest.link(block, block.next)
        block.size = size
        return rest


def release_segment(device: SimulatedDevice, block: MemoryBlock) -> None:
    """Give a segment that is one free block back to the device."""
    block.pool.drop(block)
    device.reserved -= block.size


def map_segment(
    device: SimulatedDevice, pool: BlockPool, size: int, page: int
) -> MemoryBlock | None:
    """Unused addresses of ``size`` bytes with memory mapped behind them, or None without room.

    Pages mapped before the room ran out stay with the pool.
    """
    block = _unused_addresses(device, pool, size, page)
    if not block.mapped and not _map(device, block, min(block.size, size), page):
        return None
    while block.size < size:
        after = block.next
        if after is None or not _map(device, after, min(size - block.size, after.size), page):
            return None
        block = after  # it has swallowed the block before it
    pool.drop(block)
    return block


def _unused_addresses(
    device: SimulatedDevice, pool: BlockPool, size: int, page: int
) -> MemoryBlock:
    """The lowest run of free and unmapped blocks of ``size`` bytes, or a new segment."""
    for _, block in pool.unmapped:
        before = block.prev
        start = before if before is not None and not before.in_use else block
        room, part = 0, start
        while part is not None and not part.in_use and room < size:
            room, part = room + part.size, part.next
        if room >= size:
            return start
    # PyTorch takes an eighth more than the device has, to move pages to the end.
    reach = ENDLESS if device.capacity is None else device.capacity * 9 // 8
    length = -(-max(reach, size) // page) * page
    segment = ExpandableSegment(device.addresses(length, page), page)
    block = MemoryBlock(pool, segment.base, length, segment)
    block.mapped = False
    pool.put(block)
    return block


def _map(device: SimulatedDevice, block: MemoryBlock, size: int, page: int) -> bool:
    """Put memory behind the first ``size`` bytes of a block, in whole pages, if there is any."""
    pool, mapped = block.pool, -(-size // page) * page
    if not device.fits(mapped):
        return False
    pool.drop(block)
    if mapped < block.size:
        pool.put(pool.cut(block, mapped))
    block.mapped = True
    pool.merge(block)
    pool.put(block)
    device.reserve(mapped)
    return True


def unmap_block(device: SimulatedDevice, block: MemoryBlock, segment: ExpandableSegment) -> None:
    """Take the memory from behind the whole pages of a free block."""
    page, pool = segment.page, block.pool
    start = segment.base + -(-(block.address - segment.base) // page) * page
    end = segment.base + (block.address + block.size - segment.base) // page * page
    if start >= end:
        return
    pool.drop(block)
    if start > block.address:
        front, block = block, pool.cut(block, start - block.address)
        pool.put(front)
    if end < block.address + block.size:
        pool.put(pool.cut(block, end - block.address))
    block.mapped = False
    pool.merge(block)
    device.reserved -= end - start
    if block.prev is not None or block.next is not None:
        pool.put(block)  # otherwise nothing of the segment is used, and it goes as a whole
