"""The commands of `lowtide`; heavy imports wait until one of them runs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lowtide.cli.command_group import LazyGroup
from lowtide.cli.shell import CliState, print_error, print_failure
from lowtide.core.atomic_file import is_disk_full, write_error
from lowtide.core.errors import UsageError

_EXIT_CODES = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage or bad input · 3 no plan fits the budget ·"
    " 4 some inputs of a batch failed · 130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."
)


# Where each command is in `lowtide.cli`, and the line that help says of it.
_PLANS = {
    "upscale": (
        "plan_commands:plan_upscale",
        "Predict what upscaling would do and use: reads headers only, writes no result.",
    ),
    "denoise": (
        "plan_commands:plan_denoise",
        "Predict what denoising would do and use: estimates noise levels, writes no result.",
    ),
    "video": (
        "plan_commands:plan_video",
        "Predict what upscaling a video would do and use: reads packets, decodes one frame, writes"
        " no result.",
    ),
    "train": (
        "plan_train:TRAIN_COMMAND",
        "Predict whether training a model fits a GPU's memory, and what would make it fit.",
    ),
    "vae": (
        "plan_vae:vae",
        "Predict what encoding and decoding a clip would take on a GPU.",
    ),
}
_BENCHES = {
    "upscale": (
        "bench_upscale:upscale",
        "Measure time, memory and accuracy of ways to upscale an image on this machine.",
    ),
}
_TRAININGS = {
    "sr": ("train_sr:SR_COMMAND", "Train an upscaler within a memory budget, or resume a run."),
    "denoise": (
        "train_denoise:DENOISE_COMMAND",
        "Train a denoiser within a memory budget, or resume a run.",
    ),
    "forecast": (
        "train_forecast:FORECAST_COMMAND",
        "Train a forecaster of a table within a memory budget, or resume a run.",
    ),
    "noise": (
        "train_noise:train_noise",
        "Calibrate the noise of a camera or an MRI scanner from its files.",
    ),
}
_EXPORTS = {
    "onnx": ("export:onnx", "Write a model as an ONNX file for images of any size, and check it."),
}
_AUTOENCODERS = {
    "encode": (
        "vae:encode",
        "Encode a video to latents by a video autoencoder, within a memory budget.",
    ),
    "decode": (
        "vae:decode",
        "Decode latents to a video by a video autoencoder, within a memory budget.",
    ),
    "roundtrip": (
        "vae:roundtrip",
        "Encode a video and decode it again, and say how much the autoencoder loses.",
    ),
}
_COMMANDS = {
    "upscale": ("upscale:upscale", "Upscale photographs within a memory budget."),
    "denoise": ("denoise:denoise", "Remove the noise of photographs within a memory budget."),
    "video": ("video:video", "Upscale videos within a memory budget."),
    "forecast": (
        "forecast:forecast",
        "Forecast the series of a table: quantiles and sample paths.",
    ),
    "backtest": (
        "forecast:backtest",
        "Score the forecasts of a table's last part, compared with every method.",
    ),
    "models": (
        "models:models",
        "List the bundled models, what for and how fast, or describe model files.",
    ),
    "doctor": (
        "doctor:doctor",
        "Show versions, devices, half-precision speed, extras and attention backends.",
    ),
    "plan": (_PLANS, "Predict what a command would do and use, without running it."),
    "bench": (_BENCHES, "Compare configurations on this machine."),
    "train": (_TRAININGS, "Train a model within a memory budget."),
    "export": (_EXPORTS, "Write models as files for other runtimes."),
    "vae": (_AUTOENCODERS, "Encode and decode clips by a video autoencoder."),
}


class _RootGroup(LazyGroup):
    """Root command group; it reports usage errors as JSON too, with ``--json``."""

    def __init__(self, **more: Any) -> None:
        super().__init__(_COMMANDS, **more)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the root's arguments; usage errors are reported as JSON too."""
        with _json_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand, whose arguments are parsed here; report usage errors."""
        with _json_usage_errors():
            return super().invoke(ctx)


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
