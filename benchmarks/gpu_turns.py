"""Processes that prepare at the same time and use the GPU one after another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# How far a case is; 0 before.
PLANNED, MEASURED, DONE = 1, 2, 3


class Turn:
    """One of several processes that plan at the same time and use the GPU in turn."""

    def __init__(self, number: int, changed: Any, states: Any, patience: float) -> None:
        self._number, self._changed, self._states = number, changed, states
        self._end = time.monotonic() + patience

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While others plan."""
        with self._changed:
            yield

    def wait_for(self, state: int) -> None:
        """Be in a state; go on once all are, and those before are beyond it. What others still
        plan is waited for as long as patience lasts."""
        self.tell(state)
        with self._changed:
            while not self._is_mine(state):
                self._changed.wait(1)

    def tell(self, state: int) -> None:
        """How far this one is."""
        with self._changed:
            self._states[self._number] = state
            self._changed.notify_all()

    def _is_mine(self, state: int) -> bool:
        late = state == PLANNED and time.monotonic() > self._end
        all_are = late or all(other >= state for other in self._states)
        return all_are and all(before > state for before in self._states[: self._number])
