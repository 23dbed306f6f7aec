"""Command `lowtide plan train`: predict the memory of a training step."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.progress_bar import step_printer
from lowtide.cli.shell import handle_errors, option, print_result
from lowtide.core.errors import UsageError

_STEP, _DEVICE, _OUT = "Training step", "Device", "Output"


class Optimizer(StrEnum):
    """Values of --optimizer."""

    auto = "auto"
    adamw, adamw_foreach, adamw_fused = "adamw", "adamw-foreach", "adamw-fused"
    sgd, sgd_momentum = "sgd", "sgd-momentum"


class Checkpointing(StrEnum):
    """Values of --checkpointing."""

    none, selective, full = "none", "selective", "full"


class TrainPrecision(StrEnum):
    """Values of --precision."""

    fp32, bf16, fp16 = "fp32", "bf16", "fp16"


@handle_errors
def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "package.module:function or path/to/file.py:function, which returns a module; a"
                " bundled model; or a model file. Python files are run."
            ),
        ),
    ],
    batch: Annotated[int, option("--batch", panel=_STEP, help="Images in a micro-batch.")] = 4,
    size: Annotated[
        str, option(panel=_STEP, help=("Size of the images, 256 or WIDTHxHEIGHT."))
    ] = "256",
    inputs: Annotated[
        list[str] | None,
        option(
            "--input",
            panel=_STEP,
            metavar="SHAPE",
            help=(
                "Shape of an input without the batch dimension: 3,h,w or 4,h/8,w/8 or 77,768 or"
                " :int64. Once for each input, in order. Default: the model's own"
                " example_inputs(batch, size), or images."
            ),
        ),
    ] = None,
    channels: Annotated[
        int | None,
        option(
            panel=_STEP,
            help=("Channels of the images. Default: those of the model's first convolution."),
        ),
    ] = None,
    optimizer: Annotated[
        Optimizer,
        option(
            panel=_STEP,
            help=("auto is AdamW in the form that PyTorch takes by default on the device."),
        ),
    ] = Optimizer.auto,
    checkpointing: Annotated[
        Checkpointing, option(panel=_STEP, help=("What the backward pass recomputes."))
    ] = Checkpointing.none,
    precision: Annotated[
        TrainPrecision, option(panel=_STEP, help=("bf16 and fp16 are autocast over fp32 weights."))
    ] = TrainPrecision.fp32,
    ema: Annotated[
        bool,
        option("--ema", panel=_STEP, help=("Keep a moving average of the weights on the device.")),
    ] = False,
    accumulate: Annotated[int, option(panel=_STEP, help=("Micro-batches in a step."))] = 1,
    validation_batch: Annotated[
        int | None,
        option(
            panel=_STEP,
            metavar="N",
            help=("Images of a validation pass after the step. Default: no validation pass."),
        ),
    ] = None,
    validation_size: Annotated[
        str | None,
        option(
            panel=_STEP, metavar="SIZE", help=("Size of the validation images. Default: --size.")
        ),
    ] = None,
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
            help=("One line for every known GPU, up to the first option that fits."),
        ),
    ] = False,
    budget: Annotated[
        str,
        option(
            "-b",
            "--budget",
            panel=_DEVICE,
            help=(
                "Memory for the process: 6GiB, 80% of the GPU's memory, or auto: all but what a"
                " display usually takes."
            ),
        ),
    ] = "auto",
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            panel=_OUT,
            metavar="FILE",
            help=("Plot the step's memory over time to a .png or .svg file."),
        ),
    ] = None,
    as_json: Annotated[
        bool, option("--json", panel=_OUT, help="Print the plan as JSON on stdout.")
    ] = False,
    quiet: Annotated[bool, option("-q", "--quiet", panel=_OUT, help="No progress.")] = False,
) -> None:
    """Predict whether training a model fits a GPU's memory, and what would make it fit.

    Nothing is trained and no GPU is needed: the step is traced without data.
    """
    if all_devices and (plot is not None or device != "auto"):
        raise UsageError(
            "--all-devices contradicts --device and --plot", hint="drop it, or the others"
        )
    settings: dict[str, Any] = dict(
        batch=batch,
        size=size,
        inputs=tuple(inputs or ()),
        channels=channels,
        optimizer=optimizer.value,
        checkpointing=checkpointing.value,
        precision=precision.value,
        ema=ema,
        accumulate=accumulate,
        validation_batch=validation_batch,
        validation_size=validation_size,
        budget=budget,
    )
    with step_printer("tracing", "the step", quiet=quiet) as tell:
        from lowtide.jobs import plan_train as job

        if all_devices:
            result = job.plan_training_on_all_gpus(model, progress=tell, **settings)
        else:
            result = job.plan_training(model, device=device, plot=plot, progress=tell, **settings)
    # The plan is printed even if nothing fits, which is an error.
    print_result(result, lambda: typer.echo(str(result)), result.require, as_json=as_json)
