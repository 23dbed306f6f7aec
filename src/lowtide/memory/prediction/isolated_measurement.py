"""Operator measurement in a child process, so that a crash stays there.

An operator is measured on zeros of the recorded layouts. Most operators only compute with them.
Some use them as indices, and a kernel that does not check its indices, or that PyTorch's fake
results describe wrongly, ends its process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import threading
from typing import IO, Any

import torch

from lowtide.core.heap import heap_is_tuned
from lowtide.core.python_child import start_python
from lowtide.memory.prediction.op_signature import Call, all_tensors

_TIMEOUT_SECONDS = 30.0
_NAMESPACES = frozenset({"aten", "prims", "mkldnn"})
# In addition to `torch.Tag.core`: they copy integer elements, or read only their shape.
_COPY_OPERATORS = frozenset(
    """
    copy_ stack roll fill_ ones_like empty_like rand_like randn_like
    """.split()
)


class NotMeasuredError(Exception):
    """Raised when an operator cannot be measured; the message says why.

    ``permanent`` says that another attempt would fail in the same way.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.permanent = permanent


def is_safe_in_process(call: Call) -> bool:
    """Return whether an operator can be measured in this process.

    It can if it only computes with its arguments, or checks those that are indices.
    """
    function = call[0]
    if function.namespace not in _NAMESPACES:
        return False
    if torch.Tag.core in function.tags or torch.Tag.pointwise in function.tags:
        return True
    values = {facts.dtype for facts in all_tensors(call)} - {torch.bool}
    return all(kind.is_floating_point or kind.is_complex for kind in values) or (
        function.overloadpacket.__name__ in _COPY_OPERATORS
    )


def measure_isolated(call: Call) -> int:
    """Measure the peak bytes of one operator in a child process shared by all calls.

    After an operator has ended a child, this process does not run it again, whatever its arguments:
    each try would start another child.

    Raises:
        NotMeasuredError: The child ended, took more than 30 s, or could not run the operator.
    """
    with _LOCK:
        if call[0] in _crashed:
            raise _crashed[call[0]]
        try:
            return (_running_child() or _start_child()).measure(call)
        except _CrashError as error:
            _crashed[call[0]] = error
            raise


class _CrashError(NotMeasuredError):
    """Raised when the child ended during a measurement; says how."""


class _Child:
    """Child process that measures one operator per request."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.process = start_python(
            "lowtide.memory.prediction._isolated_main:main",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send({"threads": torch.get_num_threads(), "tuned": heap_is_tuned()})

    def measure(self, call: Call) -> int:
        """Return the peak bytes of one operator; raises as `measure_isolated` does."""
        function, args, keywords = call
        try:
            payload = pickle.dumps((function.name(), function._overloadname, args, keywords))
        except Exception as error:
            raise NotMeasuredError("with arguments that cannot be pickled") from error
        timer = threading.Timer(_TIMEOUT_SECONDS, self.process.kill)
        timer.start()
        try:
            self._send(payload)
            answer: Any = pickle.load(self._pipe(self.process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._crash_error(timer.finished.is_set()) from error
        finally:
            timer.cancel()
        if isinstance(answer, str):
            raise NotMeasuredError(answer)
        return answer

    def close(self) -> None:
        """End the child, unless a parent that this process was forked from started it."""
        if self.owner_pid != os.getpid():
            return
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()

    def _send(self, what: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `ask` reports how the child ended
            pipe = self._pipe(self.process.stdin)
            pickle.dump(what, pipe)
            pipe.flush()

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def _crash_error(self, timed_out: bool) -> _CrashError:
        status = self.process.wait()
        if timed_out:
            return _CrashError(f"not measured within {_TIMEOUT_SECONDS:.0f} s")
        names = {-entry.value: entry.name for entry in signal.Signals}
        name = names.get(status, f"status {status}")
        # SIGKILL may come from the system's out-of-memory killer, so it may not last.
        return _CrashError(f"crashed a child process with {name}", permanent=name != "SIGKILL")


_LOCK = threading.Lock()
_children: list[_Child] = []
_crashed: dict[Any, _CrashError] = {}


def _running_child() -> _Child | None:
    own = (one for one in _children if one.owner_pid == os.getpid())
    return next((one for one in own if one.process.poll() is None), None)


def _start_child() -> _Child:
    _close_children()
    _children[:] = [_Child()]
    return _children[0]


@atexit.register
def _close_children() -> None:
    while _children:
        _children.pop().close()
