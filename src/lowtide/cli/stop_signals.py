"""Signals that ask a command to end: Ctrl-C, SIGTERM of systems, SIGHUP of a closed terminal.

Each ends a command in the same way: files that are not complete are removed, a training saves its
step, and the exit code is 128 and the signal's number. One that is ignored when the command starts,
as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lowtide.core.errors import Cancelled

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_IMPORTS = "<frozen importlib"
_TERMINALS = (1, 2)


class StopSignals:
    """The first signal that came, and the event of a job that finishes its step before it ends."""

    number: int | None = None
    event: threading.Event | None = None


@contextmanager
def handle_stop_signals(*, whole_process: bool) -> Iterator[None]:
    """Let signals raise `KeyboardInterrupt` in the block, of which the first one counts.

    Nothing changes outside the main thread, where Python knows no signals. After the block they are
    ignored if it is the ``whole_process``: what it did is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    StopSignals.number = None
    terminals = [one for one in _TERMINALS if os.isatty(one)]

    def stop(number: int, frame: FrameType | None) -> None:
        again = StopSignals.number is not None
        StopSignals.number = StopSignals.number or number
        if number == getattr(signal, "SIGHUP", None):
            _leave(terminals)
        if again and number != signal.SIGINT:
            return  # one group of processes may be asked twice; only a person is impatient
        if StopSignals.event is not None and not again:
            StopSignals.event.set()
        elif _is_starting(frame):
            # An exception in an import may be lost, or come out as another one.
            os.write(2, b"error: interrupted before anything was done\n")
            os._exit(exit_code())
        else:
            raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in _SIGNALS}
    changed = [one for one, handler in before.items() if handler != signal.SIG_IGN]
    for one in changed:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in changed:
            signal.signal(one, signal.SIG_IGN if whole_process else before[one])


@contextmanager
def finish_step() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets, instead of raising, in the block.

    The current step is finished and saved then. A second Ctrl-C stops at once.
    """
    StopSignals.event = threading.Event()
    try:
        yield StopSignals.event
    finally:
        StopSignals.event = None


def exit_code() -> int:
    """Return the exit code of a command that was asked to end."""
    return 128 + (StopSignals.number or signal.SIGINT)


def as_stop(error: BaseException) -> Cancelled | None:
    """Return what ``error`` is to the user where a signal led to it, else None.

    Libraries may turn the `KeyboardInterrupt` that a signal raised into errors of their own.
    """
    if isinstance(error, Cancelled):
        stopped = error
    elif isinstance(error, KeyboardInterrupt) or StopSignals.number is not None:
        stopped = Cancelled(
            "interrupted; finished files are kept, partial ones are removed",
            hint="run the same command again to resume",
        )
    else:
        return None
    if StopSignals.number is not None:
        stopped.exit_code = exit_code()
    return stopped


def _is_starting(frame: FrameType | None) -> bool:
    """Return whether a command has not begun, or imports its job: there is nothing to tidy up."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    begun = False
    for one in reversed(frames):
        module = one.f_globals.get("__name__", "")
        if one.f_code.co_filename.startswith(_IMPORTS):
            return True
        if module.startswith("lowtide.") and not module.startswith("lowtide.cli"):
            return False
        begun |= module == "lowtide.cli.shell"
    return not begun


def _leave(terminals: list[int]) -> None:
    """Write nothing more to a terminal that may be gone: an error there would end a step."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for one in terminals:
        os.dup2(nowhere, one)
    os.close(nowhere)
