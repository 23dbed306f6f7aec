"""Parallel execution of one image's tiles on several devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from lowtide.memory.oom import is_out_of_memory
from lowtide.streaming.tiles.recovery import Results, RetryingTileRunner, Tiles


@dataclass
class DeviceWorker:
    """One device's network and the thread that runs its tiles.

    With a single worker, the thread is not used.
    """

    name: str
    runner: RetryingTileRunner
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lowtide-lane")
    )


class DeviceWorkers:
    """Runs groups of tiles on ``workers`` in parallel, one group per worker at a time.

    A single worker may have ``in_flight`` groups in flight to its device and back. Results come in
    the order of their groups, so one thread merges them. A device that fails for any reason but out
    of memory is dropped, and another one takes over its group; the last device's error is raised.
    `close` ends the threads.
    """

    def __init__(self, workers: Sequence[DeviceWorker], in_flight: int = 1) -> None:
        self._workers, self._active, self._in_flight = list(workers), list(workers), in_flight
        self._failure_events: list[str] = []

    @property
    def batch(self) -> int:
        """Number of tiles to put in a group."""
        return min(lane.runner.batch for lane in self._active)

    @property
    def events(self) -> list[str]:
        """Recovery events in words, with the worker's name where there are several."""
        if len(self._workers) == 1:
            return self._workers[0].runner.events
        described = [
            f"{lane.name}: {event}" for lane in self._workers for event in lane.runner.events
        ]
        return described + self._failure_events

    def shrink(self, reason: str) -> None:
        """Use smaller batches from now on, unless they are 1 already."""
        for lane in self._active:
            lane.runner.shrink(reason)

    def run(self, groups: Iterable[Tiles]) -> Iterator[Results]:
        """Yield the results of each group, in order.

        No more groups are held than run at once; a group is held until its result is there, and
        must not change.
        """
        if len(self._workers) == 1:
            step = self._workers[0].runner
            several = self._in_flight > 1
            yield from step.run_pipelined(groups, self._in_flight) if several else map(step, groups)
            return
        remaining, running = (
            iter(groups),
            deque[tuple[Tiles, DeviceWorker, Future[Results]]](),
        )
        while True:
            busy = [lane for _, lane, _ in running]
            idle = [lane for lane in self._active if lane not in busy]
            for lane, group in zip(idle, remaining, strict=False):
                running.append((group, lane, lane.executor.submit(lane.runner, group)))
            if not running:
                return
            yield self._result(*running.popleft())

    def close(self) -> None:
        """Wait for running groups, and end the threads."""
        for lane in self._workers:
            lane.executor.shutdown(cancel_futures=True)

    def _result(self, group: Tiles, worker: DeviceWorker, future: Future[Results]) -> Results:
        while True:
            try:
                return future.result()
            except RuntimeError as error:
                if is_out_of_memory(error) or self._active == [worker]:
                    raise
                self._drop(worker, error)
            worker = self._active[0]
            future = worker.executor.submit(worker.runner, group)

    def _drop(self, worker: DeviceWorker, error: RuntimeError) -> None:
        if worker not in self._active:
            return  # it already failed on another group
        self._active.remove(worker)
        what = str(error).partition("\n")[0]
        self._failure_events.append(
            f"{worker.name} failed ({what}): its tiles went to {self._active[0].name}"
        )
