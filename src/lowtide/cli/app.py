"""The commands of `lowtide`; heavy imports wait until one of them runs."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from lowtide.cli import (
    bench_upscale,
    denoise,
    doctor,
    export,
    forecast,
    models,
    plan_commands,
    plan_train,
    plan_vae,
    train,
    train_denoise,
    train_forecast,
    train_noise,
    train_sr,
    upscale,
    vae,
    video,
)
from lowtide.cli.settings_options import AliasCommand
from lowtide.cli.shell import CliState, print_error, print_failure
from lowtide.core.atomic_file import is_disk_full, write_error
from lowtide.core.errors import UsageError

_EXIT_CODES = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage or bad input · 3 no plan fits the budget ·"
    " 4 some inputs of a batch failed · 130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."
)


class _RootGroup(TyperGroup):
    """Root command group.

    It reports usage errors as JSON too, with ``--json``; Typer prints its own as usual. And it
    refuses empty names of files, as unset variables give: Python takes them for this folder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_empty_names(self)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the root's arguments; usage errors are reported as JSON too."""
        with _json_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand, whose arguments are parsed here; report usage errors."""
        with _json_usage_errors():
            return super().invoke(ctx)


def _refuse_empty_names(command: Any) -> None:
    """Have all parameters of a command that are paths, and of those below it, refuse empty ones."""
    for below in getattr(command, "commands", {}).values():
        _refuse_empty_names(below)
    for parameter in command.params:
        if type(parameter.type).__name__ in ("TyperPath", "Path"):  # Typer's, or click's
            parameter.type.convert = functools.partial(_convert_name, parameter.type.convert)


def _convert_name(convert: Callable[..., Any], value: Any, *more: Any) -> Any:
    if value == "":
        raise typer.BadParameter("the name is empty: is a variable not set?", *more[::-1])
    return convert(value, *more)


@contextlib.contextmanager
def _json_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # typer depends on click or bundles a copy, so the exception class has no single name.
        says, context = getattr(error, "format_message", None), getattr(error, "ctx", None)
        if says is not None:
            where = "lowtide" if context is None else context.command_path
            print_failure(UsageError(says(), hint=f"{where} --help"))
        raise


app = typer.Typer(
    name="lowtide",
    cls=_RootGroup,
    help="Run image models in the memory you have.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
plans = typer.Typer(
    help="Predict what a command would do and use, without running it.", no_args_is_help=True
)
benches = typer.Typer(help="Compare configurations on this machine.", no_args_is_help=True)
trains = typer.Typer(help="Train a model within a memory budget.", no_args_is_help=True)
exports = typer.Typer(help="Write models as files for other runtimes.", no_args_is_help=True)
vaes = typer.Typer(help="Encode and decode clips by a video autoencoder.", no_args_is_help=True)
app.command("upscale")(upscale.upscale)
app.command("denoise", cls=AliasCommand)(denoise.denoise)
plans.command("upscale")(plan_commands.plan_upscale)
plans.command("denoise", cls=AliasCommand)(plan_commands.plan_denoise)
plans.command("video")(plan_commands.plan_video)
plans.command("train", cls=AliasCommand)(plan_train.train)
plans.command("vae")(plan_vae.vae)
app.add_typer(plans, name="plan")
benches.command("upscale")(bench_upscale.upscale)
app.add_typer(benches, name="bench")
train.add_command(trains, train_sr.SR)
train.add_command(trains, train_denoise.DENOISE)
train.add_command(trains, train_forecast.FORECAST)
trains.command("noise")(train_noise.train_noise)
app.add_typer(trains, name="train")
exports.command("onnx")(export.onnx)
app.add_typer(exports, name="export")
app.command("video")(video.video)
vaes.command("encode")(vae.encode)
vaes.command("decode")(vae.decode)
vaes.command("roundtrip")(vae.roundtrip)
app.add_typer(vaes, name="vae")
app.command("forecast")(forecast.forecast)
app.command("backtest")(forecast.backtest)
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


def run(words: list[str], *, debug: bool, as_json: bool) -> None:
    """Run the command of ``words``.

    Args:
        words: Command, options and arguments.
        debug: Show tracebacks.
        as_json: One JSON document is printed, of an error too.
    """
    CliState.debug, CliState.json = debug, as_json
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks must not fail a finished job.
            stream.reconfigure(errors="backslashreplace")
    if not debug:
        # Users cannot act on deprecation warnings of the architectures in model files.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    try:
        app(words, prog_name="lowtide")
    except OSError as error:
        if debug or not is_disk_full(error):
            raise
        _exit_disk_full(error)
    finally:
        # A process may run several commands.
        CliState.debug, CliState.json = False, False


def _exit_disk_full(error: OSError) -> None:
    """Exit with an unreported disk-full error, as when stdout is a file."""
    full = write_error(Path(error.filename or "standard output"), error)
    with contextlib.suppress(OSError, ValueError):
        # Flushing the rest of standard output at exit would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    print_error(full.message, full.hint)
    sys.exit(full.exit_code)
