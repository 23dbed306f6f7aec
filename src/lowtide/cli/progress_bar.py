"""Progress display: a bar on a terminal, a plain line at intervals elsewhere.

And running a job with it, in a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer

from lowtide.cli.shell import stderr_is_terminal
from lowtide.core.heap import tune_heap
from lowtide.core.progress import Progress
from lowtide.core.units import format_bytes, format_seconds

_PLAIN_SECONDS = 5.0
# Phases before the first result, each shown once.
_PHASE_TEXTS = {
    "compile": "compiling",
    "record": "capturing a CUDA graph of",
    "capture": "planning bands for",
}

R = TypeVar("R")


def _is_silent(quiet: bool) -> bool:
    return quiet or bool(os.environ.get("LOWTIDE_NO_PROGRESS"))


@contextlib.contextmanager
def step_printer(doing: str, first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows a job's current step on stderr.

    On a terminal one line is updated, beginning with ``first``; elsewhere each step prints a line.
    """
    if _is_silent(quiet):
        yield lambda name: None
    elif stderr_is_terminal():
        from rich.console import Console

        with Console(stderr=True).status(f"{doing}: {first}") as status:
            yield lambda name: status.update(f"{doing}: {name}")
    else:
        yield lambda name: typer.echo(f"{doing}: {name}", err=True)


class JobProgressPrinter:
    """Progress callback for jobs; ``quiet`` or ``LOWTIDE_NO_PROGRESS`` silence it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._silent = _is_silent(quiet)
        self._bar = None
        self._task = None
        self._last_shown = 0.0
        self._name = ""

    def __call__(self, event: Progress) -> None:
        """Show one progress event of a job."""
        if self._silent:
            return
        if event.phase == "done":
            self.close()
        elif event.phase == "load":
            if not stderr_is_terminal():
                typer.echo(f"loading {event.name}", err=True)
        elif event.phase == "slow":
            typer.echo(f"note: {event.name}", err=True)
        elif event.phase == "probe":
            typer.echo(
                f"measuring {event.name}, once on this machine; a large model takes minutes",
                err=True,
            )
        elif event.phase in _PHASE_TEXTS:
            typer.echo(f"{_PHASE_TEXTS[event.phase]} {event.name}", err=True)
        elif stderr_is_terminal():
            self._show_bar(event)
        else:
            self._show_line(event)

    def close(self) -> None:
        """Stop the progress bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, event: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[detail]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, detail="")
        assert self._task is not None
        self._bar.update(
            self._task,
            description=_title(event),
            total=event.total,
            completed=event.done,
            detail=_detail(event),
        )

    def _show_line(self, event: Progress) -> None:
        now = time.monotonic()
        title = _title(event)
        finished, fresh = event.done >= event.total, title != self._name
        if finished or fresh or now - self._last_shown >= _PLAIN_SECONDS:
            self._last_shown, self._name = now, title
            share = 100 * event.done // max(event.total, 1)
            typer.echo(f"{title} {share}% {_detail(event)}", err=True)


def _title(event: Progress) -> str:
    count = f"[{event.image}/{event.images}] " if event.images > 1 else ""
    if event.phase == "check":
        count += "reading back: "
    return (
        f"{count}{event.name}".replace("[", r"\[")
        if stderr_is_terminal()
        else f"{count}{event.name}"
    )


def _detail(event: Progress) -> str:
    left = f"{format_seconds(event.eta)} left" if event.eta is not None else "starting"
    if event.done >= event.total:
        left = format_seconds(event.elapsed)
    if event.unit and event.done:
        left = f"{event.done / max(event.elapsed, 1e-9):.3g} {event.unit} a second, {left}"
    if not event.budget_bytes:  # memory is not measured
        return left
    return (
        f"{left}, memory {format_bytes(event.memory_bytes)}, peak"
        f" {format_bytes(event.peak_bytes)} of {format_bytes(event.budget_bytes)}"
    )


def run_with_progress(
    load: Callable[[], Callable[..., R]], *given: Any, quiet: bool, **more: Any
) -> R:
    """Return the report of a job that measures its memory, run in this process.

    Args:
        load: Imports the job and returns its function, which is called with the rest.
    """
    progress = JobProgressPrinter(quiet=quiet)
    try:
        tune_heap()  # before the libraries load; no other code shares this process
        run = load()
        gc.freeze()  # keep library objects out of the collection before each measurement
        return run(*given, progress=progress, **more)
    finally:
        progress.close()
