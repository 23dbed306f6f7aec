"""PyTorch profiler memory events on the CPU, in one session for all readers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
    kineto_available,
)
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
)

from lowtide.core.errors import LowtideError, UsageError
from lowtide.memory.process_memory import silence_stderr

_HINT = "measure outside it, or use how='storages' or how='resident'"
_ACTIVITIES = {ProfilerActivity.CPU}
# An empty set would record every operator. This scope belongs to an interpreter that is not in use:
# memory events still come, at half the time.
_NO_OPERATORS = {RecordScope.STATIC_RUNTIME_OP}
_CPU = torch.device("cpu")


# (address, bytes), the bytes negative for a release. A tuple, because there are thousands.
Allocation = tuple[int, int]


class AllocatedBlocks:
    """Blocks of PyTorch's CPU allocator made since `start_events`, in bytes.

    ``live`` are the bytes alive, ``peak`` their maximum since `reset_peak`, and ``events`` the
    number of allocations and releases, all as of the last `update_events` or `stop_events`. Earlier
    blocks do not count, nor do their releases.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.events = 0
        self.problem: str | None = None
        self._alive: dict[int, int] = {}

    def reset_peak(self) -> int:
        """Reset the peak to the live bytes and return the old peak."""
        peak, self.peak = self.peak, self.live
        return peak

    def __contains__(self, address: object) -> bool:
        return address in self._alive

    def add(self, allocations: list[Allocation]) -> None:
        """Count allocations and releases, given in order."""
        alive, live, peak = self._alive, self.live, self.peak
        for address, size in allocations:
            if size > 0:
                alive[address] = size
                live += size
                if live > peak:
                    peak = live
            else:
                # By address, because the size reported for an earlier block may be wrong: that of
                # an unseen block at the same address, released before.
                live -= alive.pop(address, 0)
        self.live, self.peak = live, peak
        self.events += len(allocations)


def start_events() -> AllocatedBlocks:
    """Start to count this thread's CPU allocations, until `stop_events`.

    Raises:
        UsageError: Another profiler is active, or another thread is being followed.
    """
    return _session.start()


def update_events(blocks: AllocatedBlocks) -> None:
    """Bring the counts of ``blocks`` up to date."""
    _session.update(blocks)


def stop_events(blocks: AllocatedBlocks) -> None:
    """Stop counting.

    Raises:
        LowtideError: Events were lost, for instance to another profiler.
    """
    _session.stop(blocks)


class _Session:
    """Profiler session that stops and restarts whenever a reader needs current counts.

    There is one per process: a second one, in any thread, would silently end the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: list[AllocatedBlocks] = []
        self._running = False
        self._owner = 0, -1

    def start(self) -> AllocatedBlocks:
        blocks = AllocatedBlocks()
        with self._lock:
            if self._readers:
                self._flush()
            else:
                self._stop_stale()
            self._begin()
            self._readers.append(blocks)
        return blocks

    def update(self, blocks: AllocatedBlocks) -> None:
        with self._lock:
            _check(blocks)
            self._flush()
            self._begin()

    def stop(self, blocks: AllocatedBlocks) -> None:
        with self._lock:
            _check(blocks)
            try:
                self._flush()
            except LowtideError as error:
                blocks.problem = error.message
                raise
            finally:
                if blocks in self._readers:
                    self._readers.remove(blocks)
            if self._readers:
                self._begin()

    def _begin(self) -> None:
        try:
            _start()
        except BaseException:
            self._invalidate("the profiler could not be restarted")
            raise
        self._running, self._owner = True, _current_owner()

    def _flush(self) -> None:
        """Stop the profiler and add its events to the counts of all readers."""
        if self._owner != _current_owner():
            raise UsageError(
                "regions that are open at once must begin and end in one thread, and all inside"
                " or all outside a backward pass",
                hint=_HINT,
            )
        self._running = False
        problem = "memory events were lost: another profiler was active in a measured region"
        try:
            allocations = _stop()
        except BaseException:
            self._invalidate(problem)
            raise
        if allocations is None:
            self._invalidate(problem)
            raise LowtideError(problem, hint=_HINT)
        for blocks in self._readers:
            blocks.add(allocations)

    def _stop_stale(self) -> None:
        """Stop a profiler run that its last reader left from another thread."""
        if self._running and self._owner == _current_owner():
            _stop()
        self._running = False

    def _invalidate(self, problem: str) -> None:
        for blocks in self._readers:
            blocks.problem = problem
        self._readers.clear()


def _current_owner() -> tuple[int, int]:
    """Return the thread and the backward pass.

    The profiler's state belongs to a thread, and a backward pass restores it when it ends.
    """
    return threading.get_ident(), torch._C._current_graph_task_id()


def _check(blocks: AllocatedBlocks) -> None:
    if blocks.problem is not None:
        raise LowtideError(blocks.problem, hint=_HINT)


_session = _Session()


def _start() -> None:
    if not kineto_available():
        raise UsageError("this build of PyTorch has no profiler", hint="use how='storages'")
    if _profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        raise UsageError("another profiler is active", hint=_HINT)
    config = ProfilerConfig(
        ProfilerState.KINETO,
        report_input_shapes=False,
        profile_memory=True,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=_ExperimentalConfig(),
    )
    older = torch.UntypedStorage(1)
    # The profiler's library prints a message at every start and stop.
    with silence_stderr():
        _prepare_profiler(config, _ACTIVITIES)
        # The third argument is missing from PyTorch's stub only.
        _enable_profiler(config, _ACTIVITIES, _NO_OPERATORS)  # pyright: ignore[reportCallIssue]
        # PyTorch warns of the first release, and of every thousandth, of blocks from before the
        # session. This release takes the first warning.
        del older
        torch.UntypedStorage(1)


def _stop() -> list[Allocation] | None:
    """Return the allocations and releases since `_start`; None if some are missing."""
    if not _profiler_enabled():
        return None
    with silence_stderr():
        torch.UntypedStorage(1)
        result = _disable_profiler()
    fields = _cpu_allocations(result.experimental_event_tree())
    # `_start` and `_stop` each make and free a storage of one byte.
    if len(fields) < 4:
        return None
    found = [(entry.ptr, entry.alloc_size) for entry in fields]
    # Every event carries the running total, which also counts what was reported elsewhere.
    total = fields[-1].total_allocated - fields[0].total_allocated
    return found[2:-2] if total == sum(size for _, size in found[1:]) else None


def _cpu_allocations(events: list[Any]) -> list[_ExtraFields_Allocation]:
    found: list[_ExtraFields_Allocation] = []
    for event in events:
        fields = event.extra_fields
        if type(fields) is _ExtraFields_Allocation:
            if fields.device == _CPU:
                found.append(fields)
        elif event.children:
            found += _cpu_allocations(event.children)
    return found
