"""Limit of a run's resident memory, above which the heap gives back what it keeps.

Without it a folder of pictures outgrows its budget by what glibc keeps of freed memory.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.memory.oom import trim_allocators

# Resident memory may grow by 1/_GROWTH_DIVISOR of the expected bytes before the heap is trimmed
# again; _NEW_BLOCKS_SHARE of coming bytes does not fit the heap's free blocks.
_GROWTH_DIVISOR, _NEW_BLOCKS_SHARE = 8, 0.5


class HeapLimit:
    """Trims the heap of a run before it exceeds ``expected_bytes`` by blocks that are free.

    Bands differ in size, and over hundreds of them the heap would keep several times the bytes that
    are alive.

    Args:
        current_bytes: Returns the resident bytes of the run.
        expected_bytes: What it is expected to take.
        device: Its device, such as ``"cpu"``.
    """

    def __init__(
        self, current_bytes: Callable[[], int], expected_bytes: int, device: str = "cpu"
    ) -> None:
        self._current_bytes, self._device = current_bytes, device
        self._expected = self._limit = expected_bytes

    def make_room(self, new_bytes: int) -> int:
        """Return the resident bytes plus ``new_bytes``, after trimming the heap if needed.

        The heap is trimmed only above the expected bytes.
        """
        new = int(new_bytes * _NEW_BLOCKS_SHARE)
        held = self._current_bytes() + new
        if held > self._limit:
            trim_allocators(self._device)
            held = self._current_bytes() + new
            # If that many bytes are live, trimming each time would only take time.
            self._limit = max(self._expected, held + self._expected // _GROWTH_DIVISOR)
        return held
