"""Tiles of one image through several networks at once, each with buffers of its own."""

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
    """One network: ``step`` runs its tiles, in a thread of its own where there are others."""

    name: str
    step: RetryingTileRunner
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lowtide-lane")
    )


class DeviceWorkers:
    """Runs groups of tiles through ``lanes``, as many groups at once as there are lanes; a single
    one may have ``in_flight`` groups on their way to its device and back.

    Results come in the order of their groups, so that one thread puts them together. A device that
    fails otherwise than for lack of memory is left out, and another one does what it had; the last
    one's error is raised. `close` ends the threads.
    """

    def __init__(self, lanes: Sequence[DeviceWorker], in_flight: int = 1) -> None:
        self._all, self._able, self._in_flight = list(lanes), list(lanes), in_flight
        self._lost: list[str] = []

    @property
    def batch(self) -> int:
        """Tiles that a group should have."""
        return min(lane.step.batch for lane in self._able)

    @property
    def events(self) -> list[str]:
        """What happened, lane by lane where there are several."""
        if len(self._all) == 1:
            return self._all[0].step.events
        told = [f"{lane.name}: {event}" for lane in self._all for event in lane.step.events]
        return told + self._lost

    def shrink(self, why: str) -> None:
        """Smaller batches from now on, where there is anything to take."""
        for lane in self._able:
            lane.step.shrink(why)

    def run(self, groups: Iterable[Tiles]) -> Iterator[list[Tensor]]:
        """The results of each group, in order. No more groups are held than are run at once; a
        group is kept until then, and must not change."""
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
        """Wait for what still runs, and end the threads."""
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
            return  # it failed on another group before
        self._able.remove(lane)
        what = str(error).partition("\n")[0]
        self._lost.append(f"{lane.name} failed ({what}): its tiles went to {self._able[0].name}")
