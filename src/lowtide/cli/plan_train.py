"""Command `lowtide plan train`: predict the memory of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.progress_bar import step_printer
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import JsonReport, Quiet, handle_errors, option, print_result
from lowtide.core.errors import UsageError
from lowtide.jobs.train.settings import TrainSettings

_DEVICE = "Device"


@handle_errors
@with_settings(TrainSettings)
def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "package.module:function or path/to/file.py:function, which returns a module;"
                " ldm4ts; a bundled model; or a model file. Python files are run."
            ),
        ),
    ],
    device: Annotated[
        str,
        option(
            "--device",
            panel=_DEVICE,
            help=(
                "A GPU by name, such as rtx3060-12gb, which need not be present; cpu; cuda:0; or"
                " auto, the CUDA device of this machine."
            ),
        ),
    ] = "auto",
    all_devices: Annotated[
        bool,
        option(
            "--all-devices",
            panel=_DEVICE,
            help="One line for every known GPU, up to the first option that fits.",
        ),
    ] = False,
    budget: Annotated[
        str,
        option(
            "-b",
            "--budget",
            panel=_DEVICE,
            help=(
                "Memory for the process: 6GiB, 80% of what a display leaves, or auto: all of that."
            ),
        ),
    ] = "auto",
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            panel="Output",
            metavar="FILE",
            help="Plot the step's memory over time to a .png or .svg file.",
        ),
    ] = None,
    force: Annotated[
        bool, option("--force", panel="Output", help="Replace the plot if it exists.")
    ] = False,
    as_json: JsonReport = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Predict whether training a model fits a GPU's memory, and what would make it fit.

    Nothing is trained and no GPU is needed: the step is traced without data.
    """
    if all_devices and (plot is not None or device != "auto"):
        raise UsageError(
            "--all-devices contradicts --device and --plot", hint="drop it, or the others"
        )
    settings |= {"inputs": tuple(settings["inputs"] or ()), "budget": budget}
    with step_printer("tracing", "the step", quiet=quiet) as tell:
        from lowtide.jobs.train import plan as job

        if all_devices:
            result = job.plan_training_on_all_gpus(model, progress=tell, **settings)
        else:
            result = job.plan_training(
                model, device=device, plot=plot, force=force, progress=tell, **settings
            )
    # The plan is printed even if nothing fits, which is an error.
    print_result(result, lambda: typer.echo(str(result)), result.require, as_json=as_json)
