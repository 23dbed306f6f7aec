"""Threads that read frames ahead of the network, and encode results behind it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

# Frames that wait on each side; `video_memory` counts them.
WAITING_FRAMES = 2
_POLL_SECONDS = 0.1


class _Thread(Generic[T]):
    """Thread with a queue of few places; ``stop`` ends it at the next item."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[T | None] = queue.Queue(WAITING_FRAMES)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  (raised again in the thread of the job)
            self._failure = error

    def _put(self, item: T | None) -> bool:
        """Wait for a place; False when the thread was stopped meanwhile."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                if not self._thread.is_alive():
                    return False
        return False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread at its next item, and drop what waits."""
        self._stopped.set()
        self._thread.join()


class ReadAhead(_Thread[T]):
    """Items of an iterable, which is iterated in a thread; its errors are raised here."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        super().__init__("lowtide-read")

    def _run(self) -> None:
        for item in self._items:
            if not self._put(item):
                return

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items."""
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    self._raise_failure()
                    return
                continue
            assert item is not None
            yield item


class WriteBehind(_Thread[T]):
    """Calls ``write`` with items in a thread; its errors are raised where the next one is put."""

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        super().__init__("lowtide-write")

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            self._write(item)

    def put(self, item: T) -> None:
        """Queue an item, once there is a place."""
        self._put(item)
        self._raise_failure()

    def finish(self) -> None:
        """Wait until all items are written."""
        self._put(None)
        self._thread.join()
        self._raise_failure()
