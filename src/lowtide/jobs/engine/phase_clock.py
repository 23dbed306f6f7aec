"""Seconds of the phases of a run, some of which are inside of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class PhaseClock:
    """Seconds by phase; those of a phase inside of another are not the other's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = 0.0  # of phases within the one that runs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        started, outer, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        taken = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inside
        self._inside = outer + taken

    def timed(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        """Return ``call`` as a phase."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.phase(name):
                return call(*args, **kwargs)

        return run
