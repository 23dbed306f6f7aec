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
_ARENA_ID = -9
# Arena sizes to try, in percent of the run's peak: the best one depends on all that follows. For
# runs with many events fewer sizes are tried, to replay at most this number of events.
_ARENA_PERCENTS = range(40, 131, 3)
_MAX_REPLAYED_EVENTS = 500_000
# A larger share of the bytes reserved without an arena is not worth it.
_MAX_RESERVED_RATIO = 0.98


def replay_with_arena(
    existing: Sequence[Event], events: Sequence[Event], arena_bytes: int = 0
) -> CachingAllocator:
    """Replay a run on a new allocator, after an arena of ``arena_bytes`` bytes is freed.

    Args:
        existing: allocations that exist before the run.
        events: those of the run.
        arena_bytes: bytes of the arena that is allocated and freed between the two; 0 for none.

    Returns:
        The allocator after the run.
    """
    allocator = CachingAllocator()

    def requests() -> Iterator[Event]:
        yield from existing
        if arena_bytes:
            yield _ARENA_ID, arena_bytes
            yield _ARENA_ID, -arena_bytes
            allocator.peak_allocated = allocator.allocated  # peak of the run alone
        yield from events

    replay_requests(requests(), allocator)
    return allocator


def best_arena_bytes(existing: Sequence[Event], events: Sequence[Event]) -> int:
    """Return the arena bytes with which least is reserved; 0 where none is worth it."""
    without = replay_with_arena(existing, events)
    own = without.peak_allocated - sum(size for _, size in existing)
    step = -(-len(events) * len(_ARENA_PERCENTS) // _MAX_REPLAYED_EVENTS) or 1
    sizes = (share * own // 100 for share in _ARENA_PERCENTS[step // 2 :: step])
    reserved = {
        size: replay_with_arena(existing, events, size).peak_reserved for size in sizes if size > 0
    }
    best = min(reserved, key=lambda size: reserved[size], default=0)
    return best if best and reserved[best] <= _MAX_RESERVED_RATIO * without.peak_reserved else 0
