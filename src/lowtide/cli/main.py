"""The `lowtide` command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from lowtide.cli import (
    bench_upscale,
    doctor,
    export,
    models,
    plan_train,
    plan_upscale,
    train,
    upscale,
)
from lowtide.cli.shell import CliState, print_error, print_failure
from lowtide.core.atomic_file import is_lack_of_space, write_error
from lowtide.core.errors import UsageError

_EXIT_CODES = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage or bad input · 3 no plan fits the budget ·"
    " 4 some inputs of a batch failed · 130 interrupted."
)


class _JsonErrorGroup(TyperGroup):
    """The top of the command line. What typer itself refuses, wrong words, it shows as usual; with
    ``--json`` the one document says it too."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """As typer does."""
        with _refused_words():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """As typer does: the words of subcommands are read here."""
        with _refused_words():
            return super().invoke(ctx)


@contextlib.contextmanager
def _refused_words() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # typer comes with click or with a copy of it, so that the class has no one name.
        says, context = getattr(error, "format_message", None), getattr(error, "ctx", None)
        if says is not None:
            where = "lowtide" if context is None else context.command_path
            print_failure(UsageError(says(), hint=f"{where} --help"))
        raise


app = typer.Typer(
    name="lowtide",
    cls=_JsonErrorGroup,
    help="Run image models in the memory you have.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plans = typer.Typer(
    help="Say what a command would do and use, without running it.", no_args_is_help=True
)
benches = typer.Typer(
    help="Measure ways to do a thing, side by side on this machine.", no_args_is_help=True
)
trains = typer.Typer(help="Train a model inside a budget.", no_args_is_help=True)
exports = typer.Typer(help="Write models as files for other runtimes.", no_args_is_help=True)
app.command("upscale")(upscale.upscale)
plans.command("upscale")(plan_upscale.plan)
plans.command("train")(plan_train.train)
app.add_typer(plans, name="plan")
benches.command("upscale")(bench_upscale.upscale)
app.add_typer(benches, name="bench")
trains.command("sr")(train.sr)
app.add_typer(trains, name="train")
exports.command("onnx")(export.onnx)
app.add_typer(exports, name="export")
app.command("models")(models.models)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        from lowtide._version import __version__

        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show tracebacks. Works anywhere on the line."
    ),
) -> None:
    CliState.debug = CliState.debug or debug


def main(argv: list[str] | None = None) -> None:
    """Entry point: `_` and `-` are one letter in option names, `--debug` may stand anywhere.

    What follows a bare `--` is names of files, and stays as it is.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, names = words[:end], words[end:]
    CliState.debug, CliState.json = "--debug" in options, "--json" in options
    words = [_spell(word) for word in options if word != "--debug"] + names
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name or sign that the terminal's encoding lacks must not undo a finished job.
            stream.reconfigure(errors="backslashreplace")
    if not CliState.debug:
        # Deprecations inside model files' architectures are nothing a user can act on.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    try:
        app(words, prog_name="lowtide")
    except OSError as error:
        if CliState.debug or not is_lack_of_space(error):
            raise
        _out_of_space(error)


def _out_of_space(error: OSError) -> None:
    """End for want of space where nobody else said so: as for what is printed into a file."""
    full = write_error(Path(error.filename or "standard output"), error)
    with contextlib.suppress(OSError, ValueError):
        # What standard output still holds would fail once more at the end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    print_error(full.message, full.hint)
    sys.exit(full.exit_code)


def _spell(word: str) -> str:
    match = re.match(r"--[a-zA-Z0-9_-]+", word)
    return match.group().replace("_", "-") + word[match.end() :] if match else word
