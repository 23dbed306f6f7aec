"""Command `lowtide plan train`: predict the memory of a training step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lowtide.cli.common_options import Force, JsonReport, Quiet, option
from lowtide.cli.progress_bar import step_printer
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import print_result, report_errors
from lowtide.core.errors import UsageError
from lowtide.jobs.train.settings import TrainSettings


@report_errors
@with_settings(TrainSettings, "model batch device all_devices")
def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "package.module:function or path/to/file.py:function, which returns a module;"
                " ldm4ts; a network_g.type of `lowtide train sr`; a bundled model; or a model file."
                " Python files are run."
            ),
        ),
    ],
    all_devices: Annotated[
        bool,
        option(
            "--all-devices",
            panel="Device",
            help="One line for every known GPU, up to the first option that fits.",
        ),
    ] = False,
    force: Force = False,
    as_json: JsonReport = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Predict whether training a model fits a GPU's memory, and what would make it fit.

    Nothing is trained and no GPU is needed: the step is traced without data.
    """
    contradicting = settings["plot"], settings["device"]
    if all_devices and contradicting != (None, "auto"):
        raise UsageError(
            "--all-devices contradicts --device and --plot", hint="drop it, or the others"
        )
    with step_printer("tracing", "the step", quiet=quiet) as tell:
        from lowtide.jobs.train import plan as job

        if all_devices:
            del settings["plot"], settings["device"]
            result = job.plan_training_on_all_gpus(model, progress=tell, **settings)
        else:
            result = job.plan_training(model, force=force, progress=tell, **settings)
    # The plan is printed even if nothing fits, which is an error.
    print_result(result, lambda: typer.echo(str(result)), result.require, as_json=as_json)
