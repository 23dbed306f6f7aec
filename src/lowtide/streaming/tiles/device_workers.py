"""Parallel execution of one image's tiles on several devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from lowtide.memory.oom import is_out_of_memory
from lowtide.streaming.tiles.recovery import RetryingTileRunner, Tiles


@dataclass
class DeviceWorker:
    """One device's network and the thread that runs its tiles.

    With a single worker, the thread is not used.
    """

    name: str
    step: RetryingTileRunner
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lowtide-lane")
    )


class DeviceWorkers:
    """Runs groups of tiles on ``workers`` in parallel, one group per worker at a time.

    A single worker may have ``in_flight`` groups in flight to its device and back. Results come in
    the order of their groups, so one thread merges them. A device that fails for any reason but out
    of memory is dropped, and another one takes over its group; the last device's error is raised.
    `close` ends the threads.
    """

    def __init__(self, lanes: Sequence[DeviceWorker], in_flight: int = 1) -> None:
        self._all, self._able, self._in_flight = list(lanes), list(lanes), in_flight
        self._lost: list[str] = []

    @property
    def batch(self) -> int:
        """Number of tiles to put in a group."""
        return min(lane.step.batch for lane in self._able)

    @property
    def events(self) -> list[str]:
        """Recovery events in words, with the worker's name where there are several."""
        if len(self._all) == 1:
            return self._all[0].step.events
        told = [f"{lane.name}: {event}" for lane in self._all for event in lane.step.events]
        return told + self._lost

    def shrink(self, why: str) -> None:
        """Use smaller batches from now on, unless they are 1 already."""
        for lane in self._able:
            lane.step.shrink(why)

    def run(self, groups: Iterable[Tiles]) -> Iterator[list[Tensor]]:
        """Yield the results of each group, in order.

        No more groups are held than run at once; a group is held until its result is there, and
        must not change.
        """
        if len(self._all) == 1:
            step = self._all[0].step
            several = self._in_flight > 1
            yield from step.in_flight(groups, self._in_flight) if several else map(step, groups)
            return
        left, begun = iter(groups), deque[tuple[Tiles, DeviceWorker, Future[list[Tensor]]]]()
        while True:
            busy = [lane for _, lane, _ in begun]
            idle = [lane for lane in self._able if lane not in busy]
            for lane, group in zip(idle, left, strict=False):
                begun.append((group, lane, lane.thread.submit(lane.step, group)))
            if not begun:
                return
            yield self._result(*begun.popleft())

    def close(self) -> None:
        """Wait for running groups, and end the threads."""
        for lane in self._all:
            lane.thread.shutdown(cancel_futures=True)

    def _result(
        self, group: Tiles, lane: DeviceWorker, future: Future[list[Tensor]]
    ) -> list[Tensor]:
        while True:
            try:
                return future.result()
            except RuntimeError as error:
                if is_out_of_memory(error) or self._able == [lane]:
                    raise
                self._lose(lane, error)
            lane = self._able[0]
            future = lane.thread.submit(lane.step, group)

    def _lose(self, lane: DeviceWorker, error: RuntimeError) -> None:
        if lane not in self._able:
            return  # it already failed on another group
        self._able.remove(lane)
        what = str(error).partition("\n")[0]
        self._lost.append(f"{lane.name} failed ({what}): its tiles went to {self._able[0].name}")
