"""Progress display: a bar on a terminal, a plain line at intervals elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import typer

from lowtide.cli.shell import stderr_is_terminal
from lowtide.core.progress import Progress
from lowtide.core.units import format_bytes, format_seconds

_PLAIN_SECONDS = 5.0
# Phases before the first result, each shown once.
_MAKING = {
    "compile": "compiling",
    "record": "capturing a CUDA graph of",
    "capture": "planning bands for",
}


def _silent(quiet: bool) -> bool:
    return quiet or bool(os.environ.get("LOWTIDE_NO_PROGRESS"))


@contextlib.contextmanager
def step_printer(doing: str, first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows a job's current step on stderr.

    On a terminal one line is updated, beginning with ``first``; elsewhere each step prints a line.
    """
    if _silent(quiet):
        yield lambda name: None
    elif stderr_is_terminal():
        from rich.console import Console

        with Console(stderr=True).status(f"{doing}: {first}") as status:
            yield lambda name: status.update(f"{doing}: {name}")
    else:
        yield lambda name: typer.echo(f"{doing}: {name}", err=True)


class ProgressLine:
    """Progress callback for jobs; ``quiet`` or ``LOWTIDE_NO_PROGRESS`` silence it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._silent = _silent(quiet)
        self._bar = None
        self._task = None
        self._said = 0.0
        self._name = ""

    def __call__(self, moment: Progress) -> None:
        """Show one progress event of a job."""
        if self._silent:
            return
        if moment.phase == "done":
            self.close()
        elif moment.phase == "load":
            if not stderr_is_terminal():
                typer.echo(f"loading {moment.name}", err=True)
        elif moment.phase == "probe":
            typer.echo(
                f"measuring {moment.name}, once on this machine; a large model takes minutes",
                err=True,
            )
        elif moment.phase in _MAKING:
            typer.echo(f"{_MAKING[moment.phase]} {moment.name}", err=True)
        elif stderr_is_terminal():
            self._show_bar(moment)
        else:
            self._show_line(moment)

    def close(self) -> None:
        """Stop the progress bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, moment: Progress) -> None:
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
            description=_title(moment),
            total=moment.total,
            completed=moment.done,
            detail=_detail(moment),
        )

    def _show_line(self, moment: Progress) -> None:
        now = time.monotonic()
        finished, fresh = moment.done >= moment.total, moment.name != self._name
        if finished or fresh or now - self._said >= _PLAIN_SECONDS:
            self._said, self._name = now, moment.name
            share = 100 * moment.done // max(moment.total, 1)
            typer.echo(f"{_title(moment)} {share}% {_detail(moment)}", err=True)


def _title(moment: Progress) -> str:
    count = f"[{moment.image}/{moment.images}] " if moment.images > 1 else ""
    return (
        f"{count}{moment.name}".replace("[", r"\[")
        if stderr_is_terminal()
        else f"{count}{moment.name}"
    )


def _detail(moment: Progress) -> str:
    left = f"{format_seconds(moment.eta)} left" if moment.eta is not None else "starting"
    if moment.done >= moment.total:
        left = format_seconds(moment.elapsed)
    return (
        f"{left}, memory {format_bytes(moment.memory_bytes)}, peak"
        f" {format_bytes(moment.peak_bytes)} of {format_bytes(moment.budget_bytes)}"
    )
