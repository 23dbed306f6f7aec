"""Peak of live tensors and operator workspace during one call on the CPU.

Read from the memory events of PyTorch's profiler, of which a process has one session: a second one
would silently end the first. So calls inside one another share it, and it stops and restarts
wherever one of them begins or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

_HINT = "end other profilers before memory is measured or planned"
_ACTIVITIES = {ProfilerActivity.CPU}
# An empty set would record every operator. This scope belongs to an interpreter that is not in use:
# memory events still come, at half the time.
_NO_OPERATORS = {RecordScope.STATIC_RUNTIME_OP}
_CPU = torch.device("cpu")


def live_peak_bytes(call: Callable[[], Any]) -> int:
    """Run ``call`` on the CPU and return the peak bytes of tensors and workspace.

    Every allocation that this thread requests from PyTorch's CPU allocator counts, operators' own
    workspace included. The result of ``call`` is dropped inside.

    Raises:
        UsageError: Another profiler is active, another thread is being followed, or one of two
            such calls inside one another is within a backward pass.
        LowtideError: Events were lost to another profiler.
    """
    blocks = _AllocatedBlocks()
    _session.start(blocks)
    try:
        call()
    finally:
        _session.stop(blocks)
    return blocks.peak


class _AllocatedBlocks:
    """Blocks of PyTorch's CPU allocator made during one call; earlier ones do not count.

    ``peak`` is the most bytes alive. ``lost`` says that events are missing.
    """

    def __init__(self) -> None:
        self.peak, self.lost = 0, False
        self._live, self._alive = 0, dict[int, int]()

    def add(self, allocations: list[tuple[int, int]]) -> None:
        """Count (address, bytes), in order; the bytes are negative for a release."""
        for address, size in allocations:
            if size > 0:
                self._alive[address] = size
                self._live += size
                self.peak = max(self.peak, self._live)
            else:
                # By address, because the size reported for an earlier block may be wrong: that of
                # an unseen block at the same address, released before.
                self._live -= self._alive.pop(address, 0)


class _Session:
    """The profiler's session, shared by the calls that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_AllocatedBlocks] = []
        self._owner = 0, -1

    def start(self, blocks: _AllocatedBlocks) -> None:
        """Count allocations for ``blocks``, too."""
        with self._lock:
            if self._open:
                self._flush()
            self._begin()
            self._open.append(blocks)

    def stop(self, blocks: _AllocatedBlocks) -> None:
        """Bring ``blocks`` up to date and count for the others only."""
        with self._lock:
            try:
                self._flush()
            finally:
                self._open.remove(blocks)
            if self._open:
                self._begin()

    def _begin(self) -> None:
        try:
            _start_profiler()
        except BaseException:
            self._lose()
            raise
        self._owner = _current_owner()

    def _flush(self) -> None:
        """Stop the profiler and add its events to the counts of all open calls."""
        if self._owner != _current_owner():
            raise UsageError(
                "memory is being measured already: in another thread, or on the other side of a"
                " backward pass",
                hint="measure one after the other",
            )
        lost = any(blocks.lost for blocks in self._open)
        allocations = None if lost else _stop_profiler()
        if allocations is None:
            self._lose()
            raise LowtideError("memory events were lost: another profiler was active", hint=_HINT)
        for blocks in self._open:
            blocks.add(allocations)

    def _lose(self) -> None:
        for blocks in self._open:
            blocks.lost = True


def _current_owner() -> tuple[int, int]:
    """Return the thread and the backward pass.

    The profiler's state belongs to a thread, and a backward pass restores it when it ends.
    """
    return threading.get_ident(), torch._C._current_graph_task_id()


_session = _Session()


def _start_profiler() -> None:
    if not kineto_available():
        raise UsageError("this build of PyTorch has no profiler", hint="install another build")
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


def _stop_profiler() -> list[tuple[int, int]] | None:
    """Return the allocations and releases since `_start_profiler`; None if some are missing."""
    if not _profiler_enabled():
        return None
    with silence_stderr():
        torch.UntypedStorage(1)
        result = _disable_profiler()
    fields = _cpu_allocations(result.experimental_event_tree())
    # Starting and stopping each make and free a storage of one byte.
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
