"""Resident memory of a run: what is kept within the budget."""

from __future__ import annotations

from lowtide.memory.meter import CudaMeter, HostMeter
from lowtide.memory.oom import trim_allocators
from lowtide.memory.plan import Plan

# Resident memory may grow by 1/_GROWTH_DIVISOR of the expected bytes before the heap is trimmed
# again; _NEW_BLOCKS_SHARE of coming bytes does not fit the heap's free blocks.
_GROWTH_DIVISOR, _NEW_BLOCKS_SHARE = 8, 0.5


class HeldMemory:
    """Resident memory of a run, with ``queue_bytes`` bytes that are still to be written.

    Tiles fit the free blocks that tiles leave in the heap. Bands differ in size, and over hundreds
    of them the heap would keep several times the live bytes, so it is trimmed above a limit.
    """

    def __init__(
        self, meter: HostMeter | CudaMeter, plan: Plan, budget_bytes: int, queue_bytes: int
    ) -> None:
        self._meter, self._budget, self._device = meter, budget_bytes, plan.device
        banded = plan.strategy.name == "streamed"
        self._expected = queue_bytes + (plan.predicted_bytes if banded else plan.upper_bytes)
        self._limit = self._expected

    def make_room(self, new_bytes: int) -> int:
        """Return the resident bytes plus ``new_bytes``, after trimming the heap if needed.

        The heap is trimmed only above the expected bytes.
        """
        new = int(new_bytes * _NEW_BLOCKS_SHARE)
        held = self._meter.current_bytes + new
        if held > self._limit:
            trim_allocators(self._device)
            held = self._meter.current_bytes + new
            # If that many bytes are live, trimming each time would only take time.
            self._limit = max(self._expected, held + self._expected // _GROWTH_DIVISOR)
        return held

    def over_budget(self) -> bool:
        """Return whether the resident bytes exceed the budget."""
        return self.make_room(0) > self._budget
