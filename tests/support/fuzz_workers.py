"""Many cases, each a fair chance to crash or hang, run in worker processes that are used again.

A worker imports the function's module once and then answers case after case. One that dies or
gives no answer in time costs its case alone: another takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_START_SECONDS = 300


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its result, or what went wrong (a traceback, a crash, a hang)."""

    case: Any
    result: Any = None
    fault: str = ""


def run_all(
    function: Callable[[Any], Any], cases: Iterable[Any], seconds: float = 30, workers: int = 2
) -> list[Outcome]:
    """Call ``function`` with each case and return the outcomes in the order of the cases.

    The function is one of a module's own (workers import it by name), and cases and results can
    be pickled. What it raises is a fault, so that it catches what a case may rightly raise. A
    case that takes longer than ``seconds`` is a fault, and its worker is killed with all the
    processes that it started; imports of the function's module do not count.
    """
    waiting = list(enumerate(cases))[::-1]
    outcomes: dict[int, Outcome] = {}

    def work() -> None:
        worker = None
        while True:
            try:
                index, case = waiting.pop()
            except IndexError:
                break
            worker = worker or _Worker(function)
            outcomes[index] = worker.answer(case, seconds)
            worker = worker if worker.alive else None
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[index] for index in sorted(outcomes)]


class _Worker:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function), daemon=False)
        self._process.start()
        theirs.close()
        self.alive = True
        if not self._pipe.poll(_START_SECONDS):
            self.stop()
            raise TimeoutError(f"no worker of {function} within {_START_SECONDS} s")

    def answer(self, case: Any, seconds: float) -> Outcome:
        try:
            self._pipe.recv()  # that it is ready
            self._pipe.send(case)
            if not self._pipe.poll(seconds):
                self.stop()
                return Outcome(case, fault=f"no answer within {seconds} s")
            return Outcome(case, *self._pipe.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(_START_SECONDS)
            self.stop()
            return Outcome(case, fault=f"the process ended with {self._process.exitcode}")

    def stop(self) -> None:
        """End the process and those that it started."""
        self.alive = False
        if self._process.is_alive():
            try:
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    os.setsid()  # so that its own processes can be ended with it
    while True:
        pipe.send(None)
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(case), ""
        except BaseException:  # noqa: BLE001  (whatever it raises is the answer)
            answer = None, traceback.format_exc()
        pipe.send(answer)
