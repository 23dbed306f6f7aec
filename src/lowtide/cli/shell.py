"""Shared behavior of commands: errors, exit codes, results on stdout."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from lowtide.cli.stop_signals import as_stop
from lowtide.core.errors import BudgetError, Cancelled, LowtideError, OutOfMemoryError
from lowtide.core.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from pydantic import BaseModel

# What upscaling imports, by PyTorch.
_UPSCALING = "lowtide.jobs.upscale.command", "lowtide.jobs.images.prepare"
# What commands import, by their function, where it is not what upscaling does.
_LIBRARIES = {
    "lowtide.cli.forecast.forecast": ("lowtide.jobs.forecast.command", "pandas"),
    "lowtide.cli.forecast.backtest": (
        "lowtide.jobs.forecast.backtest",
        "scoringrules",
        "torch",
        "pandas",
    ),
    "lowtide.cli.train.train": ("lowtide.jobs.upscale.train", "torch.export._trace", "accelerate"),
}

P = ParamSpec("P")
R = TypeVar("R")


class CliState:
    """State of the command line; ``json`` means that one JSON document is printed."""

    debug = False
    json = False


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command to report errors as a message and the documented exit code.

    Handles `LowtideError`, Ctrl-C, signals like it and a lack of memory. With ``--json`` it
    prints a document with an ``error``, for any other exception too, before its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            _require_room_for_libraries(f"{command.__module__}.{command.__name__}")
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            named = _named(error)
            print_failure(named)
            if CliState.debug or not isinstance(named, LowtideError):
                raise
            print_error(named.message, named.hint)
            raise typer.Exit(named.exit_code) from None

    run.__doc__ = join_lines(command.__doc__ or "")
    return run


def _named(error: Exception | KeyboardInterrupt) -> Exception:
    """Return ``error``, or what it is to the user: a stop, or a lack of memory."""
    if isinstance(error, LowtideError) and not isinstance(error, Cancelled):
        return error
    if (stop := as_stop(error)) is not None:
        return stop
    assert isinstance(error, Exception)
    from lowtide.memory.oom import lacks_memory

    if not lacks_memory(error):
        return error
    return OutOfMemoryError(
        "this process got no more memory",
        hint="close other programs, or raise its limit (ulimit -d, ulimit -v)",
    )


def _require_room_for_libraries(command: str) -> None:
    """Raise `BudgetError` if a limit leaves too little for what a command imports."""
    from lowtide.memory.library_memory import require_room_for_libraries

    require_room_for_libraries(*_LIBRARIES.get(command, _UPSCALING))


def join_lines(text: str) -> str:
    """Return ``text`` with a line for each paragraph, for help of any width."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))


def print_failure(error: Exception, **more: Any) -> None:
    """Print the JSON document of a failed command, with ``more`` in it, if ``--json``."""
    if CliState.json:
        document = {"schema_version": SCHEMA_VERSION, **more, "error": error_detail(error)}
        typer.echo(json.dumps(document, indent=2))
        CliState.json = False  # print one document only, as the error propagates


def error_detail(error: Exception) -> dict[str, Any]:
    """Return an error as the dictionary that JSON documents hold."""
    message, hint = getattr(error, "message", str(error)), getattr(error, "hint", None)
    detail = {
        "type": type(error).__name__,
        "message": message,
        "hint": hint,
        "exit_code": getattr(error, "exit_code", 1),
    }
    if isinstance(error, BudgetError):
        detail["smallest_bytes"] = error.smallest
    return detail


def print_result(
    result: BaseModel, show: Callable[[], object], check: Callable[[], None], *, as_json: bool
) -> None:
    """Print a command's result as one JSON document, or with ``show``.

    An error that ``check`` raises is part of the document, and ends the command.
    """
    failure: LowtideError | None = None
    try:
        check()
    except LowtideError as error:
        failure = error
    if not as_json:
        show()
    elif failure is None:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_failure(failure, **result.model_dump(mode="json"))
    if failure is not None:
        print_error(failure.message, failure.hint)
        raise typer.Exit(failure.exit_code)


def print_error(message: str, hint: str | None = None) -> None:
    """Print an error on stderr, and its hint after an empty line."""
    typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)
    if hint:
        typer.echo("\n" + typer.style("hint: ", fg="cyan", bold=True) + hint, err=True)


def stderr_is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr.isatty()
