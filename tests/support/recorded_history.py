"""Replay of a recorded CUDA memory history on the simulated allocator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.memory.allocator import SimulatedAllocator


@dataclass(frozen=True)
class SnapshotReplay:
    """Peak reserved bytes, simulated and recorded, of one memory history.

    ``unmatched`` counts frees of blocks that were allocated before the recording; if there are any,
    the recording began too late for the two peaks to be compared.
    """

    predicted_reserved: int
    recorded_reserved: int
    allocations: int
    unmatched: int

    @property
    def error(self) -> float:
        """Relative error: predicted / recorded - 1; 0 where nothing was reserved."""
        if not self.recorded_reserved:
            return 0.0
        return self.predicted_reserved / self.recorded_reserved - 1


def replay_snapshot(
    trace_entries: Iterable[Mapping[str, Any]], allocator: SimulatedAllocator | None = None
) -> SnapshotReplay:
    """Replay a recorded CUDA memory history, and compare the peaks reserved.

    Args:
        trace_entries: one device's list of ``torch.cuda.memory._snapshot()["device_traces"]``,
            recorded by ``_record_memory_history`` from before the first allocation on.
        allocator: a new one, without a capacity by default: then it releases memory where the
            recorded one did (`empty_cache`), since only that one knew what its device had left.
    """
    allocator = allocator or SimulatedAllocator()
    replayed = _Replay(allocator)
    for entry in trace_entries:
        replayed.step(entry)
    return SnapshotReplay(
        allocator.peak_reserved, replayed.peak, replayed.allocations, replayed.unmatched
    )


class _Replay:
    """Replays entries one by one; a block is identified by its recorded address."""

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self.allocator = allocator
        self.reserved = self.peak = self.allocations = self.unmatched = 0
        self._handles: dict[int, int] = {}
        self._streams: dict[object, int] = {}
        self._last = ""

    def step(self, entry: Mapping[str, Any]) -> None:
        action = entry["action"]
        if action == "alloc":
            self._allocate(entry)
        elif action == "segment_alloc":
            self.reserved += entry["size"]
            self.peak = max(self.peak, self.reserved)
        elif action == "segment_free":
            self.reserved -= entry["size"]
            if self.allocator.capacity is None and self._last != "segment_free":
                self.allocator.empty_cache()
        elif action in ("free_requested", "free_completed"):
            self._free(entry["addr"], completed=action == "free_completed")
        self._last = action

    def _allocate(self, entry: Mapping[str, Any]) -> None:
        # Blocks of a CUDA graph's private pool serve no other requests, like those of another
        # stream.
        stream_key = entry.get("stream", 0), tuple(entry.get("pool_id", (0, 0)))
        stream = self._streams.setdefault(stream_key, len(self._streams))
        self._handles[entry["addr"]] = self.allocator.allocate(entry["size"], stream)
        self.allocations += 1

    def _free(self, address: int, *, completed: bool) -> None:
        handle = self._handles.get(address)
        if handle is None:
            self.unmatched += completed
        elif completed:
            self.allocator.complete_free(self._handles.pop(address))
        else:
            self.allocator.request_free(handle)
