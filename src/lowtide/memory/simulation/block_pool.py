"""Blocks and pools of the simulated caching allocator.

After ``c10/cuda/CUDACachingAllocator.cpp`` in pytorch/pytorch; sizes and addresses in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort


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
