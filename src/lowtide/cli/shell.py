"""How commands end: errors as sentences with a hint, exit codes, results on stdout."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from lowtide.core.errors import BudgetError, LowtideError

P = ParamSpec("P")
R = TypeVar("R")


class State:
    """What the whole command line shares."""

    debug = False


def option(*names: str, panel: str, help: str, **more: Any) -> Any:
    """An option of a command, in one of the help's panels."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn `LowtideError` and Ctrl-C into a message and the documented exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except LowtideError as error:
            if State.debug:
                raise
            if kwargs.get("as_json"):
                detail = {"type": type(error).__name__, "message": error.message,
                          "hint": error.hint, "exit_code": error.exit_code}  # fmt: skip
                if isinstance(error, BudgetError):
                    detail["smallest_bytes"] = error.smallest
                typer.echo(json.dumps({"schema_version": 1, "error": detail}, indent=2))
            complain(error.message, error.hint)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            if State.debug:
                raise
            complain("interrupted; finished files are kept, partial ones are removed",
                     "the same command goes on where this one stopped")  # fmt: skip
            raise typer.Exit(130) from None

    return run


def complain(message: str, hint: str | None = None) -> None:
    """Print an error, and its hint after an empty line, on stderr."""
    typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)
    if hint:
        typer.echo("\n" + typer.style("hint: ", fg="cyan", bold=True) + hint, err=True)


def on_terminal() -> bool:
    """Whether a person watches stderr."""
    return sys.stderr.isatty()
