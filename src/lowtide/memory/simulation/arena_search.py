"""Search for the arena size that minimizes the caching allocator's reserve.

An arena is one block that is allocated and freed before the run starts, so that the run splits it.
It leaves the allocator fewer gaps that nothing fits than segments of all the requested sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.memory.simulation.allocator import CachingAllocator, replay_requests

# (storage number, bytes), as `replay_requests` takes them.
Event = tuple[int, int]
# A storage number that no storage has.
_PIECE = -9
# Arena sizes to try, in percent of the run's peak: the best one depends on all that follows. For
# runs with many events fewer sizes are tried, to replay at most this number of events.
_SHARES = range(40, 131, 3)
_REPLAYED = 500_000
# A larger share of the bytes reserved without an arena is not worth it.
_WORTH = 0.98


def replay_with_arena(
    held: Sequence[Event], events: Sequence[Event], piece: int = 0
) -> CachingAllocator:
    """Replay a run on a new allocator, after an arena of ``piece`` bytes is freed.

    Args:
        held: allocations that exist before the run.
        events: those of the run.
        piece: bytes of the arena that is allocated and freed between the two; 0 for none.

    Returns:
        The allocator after the run.
    """
    allocator = CachingAllocator()

    def asked() -> Iterator[Event]:
        yield from held
        if piece:
            yield _PIECE, piece
            yield _PIECE, -piece
            allocator.peak_allocated = allocator.allocated  # peak of the run alone
        yield from events

    replay_requests(asked(), allocator)
    return allocator


def best_arena_bytes(held: Sequence[Event], events: Sequence[Event]) -> int:
    """Return the arena bytes with which least is reserved; 0 where none is worth it."""
    without = replay_with_arena(held, events)
    own = without.peak_allocated - sum(size for _, size in held)
    step = -(-len(events) * len(_SHARES) // _REPLAYED) or 1
    sizes = (share * own // 100 for share in _SHARES[step // 2 :: step])
    reserved = {
        size: replay_with_arena(held, events, size).peak_reserved for size in sizes if size > 0
    }
    best = min(reserved, key=lambda size: reserved[size], default=0)
    return best if best and reserved[best] <= _WORTH * without.peak_reserved else 0
