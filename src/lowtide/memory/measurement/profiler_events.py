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
_HOST = torch.device("cpu")


# (address, bytes), the bytes negative for a release. A tuple, because there are thousands.
Allocation = tuple[int, int]


class AllocatedBlocks:
    """Blocks of PyTorch's CPU allocator made since `follow_events`, in bytes.

    ``live`` are the bytes alive, ``peak`` their maximum since `restart`, and ``events`` the number
    of allocations and releases, all as of the last `update_events` or `stop_events`. Earlier blocks
    do not count, nor do their releases.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.events = 0
        self.problem: str | None = None
        self._alive: dict[int, int] = {}

    def restart(self) -> int:
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


def follow_events() -> AllocatedBlocks:
    """Start to count this thread's CPU allocations, until `stop_events`.

    Raises:
        UsageError: Another profiler is active, or another thread is being followed.
    """
    return _session.follow()


def update_events(blocks: AllocatedBlocks) -> None:
    """Bring the counts of ``blocks`` up to date."""
    _session.settle(blocks)


def stop_events(blocks: AllocatedBlocks) -> None:
    """Stop counting.

    Raises:
        LowtideError: Events were lost, for instance to another profiler.
    """
    _session.leave(blocks)


class _Session:
    """Profiler session that stops and restarts whenever a reader needs current counts.

    There is one per process: a second one, in any thread, would silently end the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: list[AllocatedBlocks] = []
        self._running = False
        self._place = 0, -1

    def follow(self) -> AllocatedBlocks:
        blocks = AllocatedBlocks()
        with self._lock:
            if self._followers:
                self._cut()
            else:
                self._clear_up()
            self._begin()
            self._followers.append(blocks)
        return blocks

    def settle(self, blocks: AllocatedBlocks) -> None:
        with self._lock:
            _check(blocks)
            self._cut()
            self._begin()

    def leave(self, blocks: AllocatedBlocks) -> None:
        with self._lock:
            _check(blocks)
            try:
                self._cut()
            except LowtideError as error:
                blocks.problem = error.message
                raise
            finally:
                if blocks in self._followers:
                    self._followers.remove(blocks)
            if self._followers:
                self._begin()

    def _begin(self) -> None:
        try:
            _start()
        except BaseException:
            self._give_up("the profiler could not be restarted")
            raise
        self._running, self._place = True, _here()

    def _cut(self) -> None:
        """Stop the profiler and add its events to the counts of all readers."""
        if self._place != _here():
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
            self._give_up(problem)
            raise
        if allocations is None:
            self._give_up(problem)
            raise LowtideError(problem, hint=_HINT)
        for blocks in self._followers:
            blocks.add(allocations)

    def _clear_up(self) -> None:
        """Stop a profiler run that its last reader left from another thread."""
        if self._running and self._place == _here():
            _stop()
        self._running = False

    def _give_up(self, problem: str) -> None:
        for blocks in self._followers:
            blocks.problem = problem
        self._followers.clear()


def _here() -> tuple[int, int]:
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
    fields = _on_host(result.experimental_event_tree())
    # `_start` and `_stop` each make and free a storage of one byte.
    if len(fields) < 4:
        return None
    found = [(entry.ptr, entry.alloc_size) for entry in fields]
    # Every event carries the running total, which also counts what was reported elsewhere.
    total = fields[-1].total_allocated - fields[0].total_allocated
    return found[2:-2] if total == sum(size for _, size in found[1:]) else None


def _on_host(events: list[Any]) -> list[_ExtraFields_Allocation]:
    found: list[_ExtraFields_Allocation] = []
    for event in events:
        fields = event.extra_fields
        if type(fields) is _ExtraFields_Allocation:
            if fields.device == _HOST:
                found.append(fields)
        elif event.children:
            found += _on_host(event.children)
    return found
