"""PyTorch's memory events on the CPU: one profiler session, shared by all that follow them."""

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

_HINT = "measure around it, or with how='storages' or how='resident'"
_ACTIVITIES = {ProfilerActivity.CPU}
# An empty set would mean every operator. This scope is of an interpreter that nobody uses, which
# leaves memory events alone and takes half the time.
_NO_OPERATORS = {RecordScope.STATIC_RUNTIME_OP}
_HOST = torch.device("cpu")


# (address, bytes), these below 0 for a release. There are thousands: no object for each.
Allocation = tuple[int, int]


class AllocatedBlocks:
    """The blocks of PyTorch's CPU allocator that came since `follow_events`, in bytes.

    ``live`` is what of them is alive, ``peak`` the most that was since `restart`, ``events`` how
    many allocations and releases there were, all as of the last `update_events` or `stop_events`.
    Blocks from before do not count, also when they go.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.events = 0
        self.problem: str | None = None
        self._alive: dict[int, int] = {}

    def restart(self) -> int:
        """Begin the peak anew with what is alive; returns the old one."""
        peak, self.peak = self.peak, self.live
        return peak

    def __contains__(self, address: object) -> bool:
        return address in self._alive

    def add(self, allocations: list[Allocation]) -> None:
        """Count allocations and releases, in their order."""
        alive, live, peak = self._alive, self.live, self.peak
        for address, size in allocations:
            if size > 0:
                alive[address] = size
                live += size
                if live > peak:
                    peak = live
            else:
                # By address, because the size reported for a block from before may be wrong:
                # that of another one, released unseen, which had the same address.
                live -= alive.pop(address, 0)
        self.live, self.peak = live, peak
        self.events += len(allocations)


def follow_events() -> AllocatedBlocks:
    """Begin to follow what this thread allocates on the CPU; to be ended by `stop_events`.

    Raises `UsageError` while another profiler is active, or others follow another thread.
    """
    return _session.follow()


def update_events(blocks: AllocatedBlocks) -> None:
    """Bring the figures up to date."""
    _session.settle(blocks)


def stop_events(blocks: AllocatedBlocks) -> None:
    """End following. Raises `LowtideError` if events were lost, for instance to a profiler."""
    _session.leave(blocks)


class _Session:
    """Stops the profiler and starts it anew wherever somebody needs to know the figures.

    There is one for the process: a second one, in any thread, would silently end the first.
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
            self._give_up("the profiler could not be started again")
            raise
        self._running, self._place = True, _here()

    def _cut(self) -> None:
        """End the profiler's run and let everybody count what it has seen."""
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
        """End a run that was left behind by somebody who left in another thread."""
        if self._running and self._place == _here():
            _stop()
        self._running = False

    def _give_up(self, problem: str) -> None:
        for blocks in self._followers:
            blocks.problem = problem
        self._followers.clear()


def _here() -> tuple[int, int]:
    """The thread and the backward pass. The profiler's state belongs to a thread, and is set
    back to what it was whenever a backward pass ends."""
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
    # The profiler's library greets at every start and end.
    with silence_stderr():
        _prepare_profiler(config, _ACTIVITIES)
        # The third argument is missing from PyTorch's stub only.
        _enable_profiler(config, _ACTIVITIES, _NO_OPERATORS)  # pyright: ignore[reportCallIssue]
        # One release in a thousand of blocks from before the session is warned of; the first
        # one is this.
        del older
        torch.UntypedStorage(1)


def _stop() -> list[Allocation] | None:
    """Allocations and releases since `_start`; None if some are missing."""
    if not _profiler_enabled():
        return None
    with silence_stderr():
        torch.UntypedStorage(1)
        result = _disable_profiler()
    fields = _on_host(result.experimental_event_tree())
    # One storage of a byte came and went at each end.
    if len(fields) < 4:
        return None
    found = [(entry.ptr, entry.alloc_size) for entry in fields]
    # Every event carries the running total, which also grows by what was reported elsewhere.
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
