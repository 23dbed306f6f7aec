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
import sys
import threading
from typing import IO, Any

import torch

from lowtide.core.heap import heap_is_tuned
from lowtide.memory.prediction.op_signature import Call, all_tensors

_SECONDS = 30.0
_CHILD = (
    "import pickle, sys; settings = pickle.load(sys.stdin.buffer);"
    " sys.path[:] = settings['path'];"
    " from lowtide.memory.prediction._isolated_main import main; main(settings)"
)
_NAMESPACES = frozenset({"aten", "prims", "mkldnn"})
# In addition to `torch.Tag.core`: they copy integer elements, or read only their shape.
_COPY = frozenset(
    {
        "copy_",
        "stack",
        "roll",
        "fill_",
        "ones_like",
        "empty_like",
        "rand_like",
        "randn_like",
    }
)


class NotMeasuredError(Exception):
    """Raised when an operator cannot be measured; the message says why.

    ``lasting`` says that another attempt would fail in the same way.
    """

    def __init__(self, why: str, *, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


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
        function.overloadpacket.__name__ in _COPY
    )


def measure_isolated(call: Call) -> int:
    """Measure the peak bytes of one operator in a child process shared by all calls.

    After an operator has ended a child, this process does not run it again, whatever its arguments:
    each try would start another child.

    Raises:
        NotMeasuredError: The child ended, took more than 30 s, or could not run the operator.
    """
    with _LOCK:
        if call[0] in _ended:
            raise _ended[call[0]]
        try:
            return (_running() or _started()).ask(call)
        except _DeathError as error:
            _ended[call[0]] = error
            raise


class _DeathError(NotMeasuredError):
    """Raised when the child ended during a measurement; says how."""


class _Child:
    """Child process that measures one operator per request."""

    def __init__(self) -> None:
        self.asked_by = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        settings = {
            "path": list(sys.path),
            "threads": torch.get_num_threads(),
            "tuned": heap_is_tuned(),
        }
        self._send(settings)

    def ask(self, call: Call) -> int:
        """Return the peak bytes of one operator; raises as `measure_isolated` does."""
        function, args, keywords = call
        try:
            words = pickle.dumps((function.name(), function._overloadname, args, keywords))
        except Exception as error:
            raise NotMeasuredError("with arguments that cannot be pickled") from error
        late = threading.Timer(_SECONDS, self.process.kill)
        late.start()
        try:
            self._send(words)
            answer: Any = pickle.load(self._pipe(self.process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._death(late.finished.is_set()) from error
        finally:
            late.cancel()
        if isinstance(answer, str):
            raise NotMeasuredError(answer)
        return answer

    def end(self) -> None:
        """End the child, unless a parent that this process was forked from started it."""
        if self.asked_by != os.getpid():
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

    def _death(self, late: bool) -> _DeathError:
        status = self.process.wait()
        if late:
            return _DeathError(f"not measured within {_SECONDS:.0f} s")
        names = {-entry.value: entry.name for entry in signal.Signals}
        name = names.get(status, f"status {status}")
        # SIGKILL may come from the system's out-of-memory killer, so it may not last.
        return _DeathError(f"crashed a child process with {name}", lasting=name != "SIGKILL")


_LOCK = threading.Lock()
_children: list[_Child] = []
_ended: dict[Any, _DeathError] = {}


def _running() -> _Child | None:
    here = (one for one in _children if one.asked_by == os.getpid())
    return next((one for one in here if one.process.poll() is None), None)


def _started() -> _Child:
    _end()
    _children[:] = [_Child()]
    return _children[0]


@atexit.register
def _end() -> None:
    while _children:
        _children.pop().end()
