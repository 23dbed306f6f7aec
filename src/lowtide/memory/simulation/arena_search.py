"""One piece of memory that a run cuts up: taken and given back before it starts, it leaves the
allocator fewer gaps that nothing fits than segments of all the sizes that are asked for do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.memory.simulation.allocator import CachingAllocator, replay_requests

# (storage number, bytes), as `replay_requests` takes them.
Event = tuple[int, int]
# A number that no storage has.
_PIECE = -9
# What is tried, in hundredths of what the run holds at most: the best one depends on all that
# follows. Of runs with many events fewer are tried, so that no more than these are replayed.
_SHARES = range(40, 131, 3)
_REPLAYED = 500_000
# A smaller gain is not worth it.
_WORTH = 0.98


def replay_with_arena(
    held: Sequence[Event], events: Sequence[Event], piece: int = 0
) -> CachingAllocator:
    """The allocator after a run of ``events`` beside what is ``held`` from the start, with a piece
    of so many bytes taken and given back between the two (0: none)."""
    allocator = CachingAllocator()

    def asked() -> Iterator[Event]:
        yield from held
        if piece:
            yield _PIECE, piece
            yield _PIECE, -piece
            allocator.peak_allocated = allocator.allocated  # of the run alone
        yield from events

    replay_requests(asked(), allocator)
    return allocator


def best_arena_bytes(held: Sequence[Event], events: Sequence[Event]) -> int:
    """The bytes of the piece with which least is reserved; 0 where none is worth it."""
    without = replay_with_arena(held, events)
    own = without.peak_allocated - sum(size for _, size in held)
    step = -(-len(events) * len(_SHARES) // _REPLAYED) or 1
    sizes = (share * own // 100 for share in _SHARES[step // 2 :: step])
    reserved = {
        size: replay_with_arena(held, events, size).peak_reserved for size in sizes if size > 0
    }
    best = min(reserved, key=lambda size: reserved[size], default=0)
    return best if best and reserved[best] <= _WORTH * without.peak_reserved else 0
