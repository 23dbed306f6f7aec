"""Runs of tiles that recover: from lack of memory, and from the failure of one of several devices.

Memory that ran out is met by a repeat, smaller batches, or smaller tiles. Finished results are
kept; only what failed runs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from lowtide.core.errors import OutOfMemoryError
from lowtide.memory.oom import OutOfMemoryCatcher, is_out_of_memory
from lowtide.memory.plan import ImageGeometry, TileStrategy
from lowtide.streaming.tiles.grid import min_tile, round_up, split_axis
from lowtide.streaming.tiles.tile_runner import TileRunner

T = TypeVar("T")
Tiles = Sequence[np.ndarray]
Results = list[np.ndarray]


class RetryingTileRunner:
    """Runs batches of tiles, with retries and smaller sizes on out of memory.

    A step that fails is first repeated unchanged, once: another program may have taken the memory,
    and other sizes select other kernels, which round differently. Batches and tiles that had to
    shrink stay so for the rest of the image. ``events`` describes in words what happened. Parts of
    a tile keep the plan's overlap, so a model whose receptive field the overlap covers gives the
    same result except for rounding. Raises `OutOfMemoryError` when the smallest part fails.
    """

    def __init__(
        self, step: TileRunner, image: ImageGeometry, tiles: TileStrategy, device: str
    ) -> None:
        self._step, self._image, self._tiles, self._device = step, image, tiles, device
        self.batch = tiles.batch
        self.events: list[str] = []
        self._too_large: set[tuple[int, ...]] = set()
        self._retries = self._retry_event_index = 0

    def shrink(self, reason: str) -> bool:
        """Halve the batch from now on; return False when it is 1 already."""
        if self.batch == 1:
            return False
        self.batch //= 2
        self.events.append(f"{reason}: batch size {self.batch} from here on")
        return True

    def __call__(self, tiles: Tiles) -> Results:
        """Run (H, W, C) tiles of one shape; return float32 (H·s, W·s, C) results in order."""
        results: list[np.ndarray] = []
        while len(results) < len(tiles):
            group = tiles[len(results) : len(results) + self.batch]
            done = self._attempt(group)
            if not done and len(group) > 1 and "smaller batch" in self._tiles.recovery:
                self.batch = len(group)
                self.shrink("out of memory")
            else:
                results += done or [self._run_divided(group[0])]
        return results

    def run_pipelined(self, groups: Iterable[Tiles], max_in_flight: int) -> Iterator[Results]:
        """Yield the results of each group in order, with up to ``max_in_flight`` groups in flight.

        After a group ran out of memory, no other is started until all before it are finished; then
        it runs alone.
        """
        remaining, pending = iter(groups), deque[tuple[Tiles, Any]]()
        while True:
            while len(pending) < max_in_flight and not (pending and pending[-1][1] is None):
                group = next(remaining, None)
                if group is None:
                    break
                pending.append((group, self._begin(group)))
            if not pending:
                return
            yield self._finish(*pending.popleft())

    def _begin(self, group: Tiles) -> Any:
        """Start a group; None where it ran out of memory, now or before."""
        if len(group) > self.batch or group[0].shape in self._too_large:
            return None
        with OutOfMemoryCatcher(self._device):
            return self._step.begin(group)
        self._record_retry()
        return None

    def _finish(self, group: Tiles, pending: Any) -> Results:
        if pending is not None:
            with OutOfMemoryCatcher(self._device):
                return list(self._step.finish(pending))
            self._record_retry()
        del pending
        return self(group)

    def with_retry(self, call: Callable[[], T]) -> T:
        """Return ``call()``, repeated once if it ran out of memory.

        Raises what the second try raises. For any call without side effects when it fails, in the
        network or outside of it.
        """
        if "retry" not in self._tiles.recovery:
            return call()
        with OutOfMemoryCatcher(self._device):
            return call()
        result = call()
        self._record_retry()
        return result

    def _record_retry(self) -> None:
        """Record a single event for all repeats."""
        self._retries += 1
        times = "once" if self._retries == 1 else f"{self._retries} times"
        event = f"out of memory {times}: the failed step was repeated and succeeded"
        if self._retries == 1:
            self._retry_event_index = len(self.events)
            self.events.append(event)
        self.events[self._retry_event_index] = event

    def _attempt(self, group: Tiles) -> Results:
        """Return the results of a group, none if it ran out of memory.

        Twice, in this call, or before with tiles of this shape.
        """
        if group[0].shape not in self._too_large:
            with OutOfMemoryCatcher(self._device):
                return list(self.with_retry(lambda: self._step(group)))
        return []

    def _run_divided(self, tile: np.ndarray) -> np.ndarray:
        """Run one tile as two or more smaller ones along its longer side."""
        image, overlap, axis = self._image, self._tiles.overlap, int(tile.shape[1] > tile.shape[0])
        side, scale = tile.shape[axis], image.scale
        half = round_up(-(-(side + overlap) // 2), image.align)
        floor = max(min_tile(overlap, image.align), image.minimum)
        divisible = not image.square and floor <= half < side
        if not divisible or "smaller tile" not in self._tiles.recovery:
            raise OutOfMemoryError(
                f"memory ran out on a tile of {tile.shape[1]}×{tile.shape[0]} pixels, and it"
                " cannot be divided further",
                hint="close other programs, or pass a smaller --budget for a plan that takes less",
            )
        if not self._too_large:
            self.events.append(
                f"out of memory: tiles of {tile.shape[1]}×{tile.shape[0]} are divided from here on"
            )
        self._too_large.add(tile.shape)
        layout = split_axis(side, half, overlap, align=image.align)
        parts = []
        for index, start in enumerate(layout.starts):
            low, high = layout.span(index)
            piece = tile.take(range(start, start + layout.tile), axis=axis)
            (result,) = self._attempt([piece]) or [self._run_divided(piece)]
            keep = slice((low - start) * scale, (high - start) * scale)
            parts.append(result[:, keep] if axis else result[keep])
        return self.with_retry(lambda: np.concatenate(parts, axis))


@dataclass
class TileWorker:
    """One device's network and the thread that runs its tiles.

    With a single worker, the thread is not used.
    """

    name: str
    runner: RetryingTileRunner
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "lowtide-lane")
    )


class TileWorkerPool:
    """Runs groups of tiles on ``workers`` in parallel, one group per worker at a time.

    A single worker may have ``in_flight`` groups in flight to its device and back. Results come in
    the order of their groups, so one thread merges them. A device that fails for any reason but out
    of memory is dropped, and another one takes over its group; the last device's error is raised.
    `close` ends the threads.
    """

    def __init__(self, workers: Sequence[TileWorker], in_flight: int = 1) -> None:
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
            deque[tuple[Tiles, TileWorker, Future[Results]]](),
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

    def _result(self, group: Tiles, worker: TileWorker, future: Future[Results]) -> Results:
        while True:
            try:
                return future.result()
            except RuntimeError as error:
                if is_out_of_memory(error) or self._active == [worker]:
                    raise
                self._drop(worker, error)
            worker = self._active[0]
            future = worker.executor.submit(worker.runner, group)

    def _drop(self, worker: TileWorker, error: RuntimeError) -> None:
        if worker not in self._active:
            return  # it already failed on another group
        self._active.remove(worker)
        what = str(error).partition("\n")[0]
        self._failure_events.append(
            f"{worker.name} failed ({what}): its tiles went to {self._active[0].name}"
        )
