"""Command `lowtide export`: write a model as an ONNX file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.progress_bar import step_printer
from lowtide.cli.shell import JsonReport, Quiet, handle_errors, option

_MAIN, _OUT = "Main", "Output"


class FilePrecision(StrEnum):
    """Values of --precision."""

    fp32, fp16, bf16, int8 = "fp32", "fp16", "bf16", "int8"


@handle_errors
def onnx(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=("A bundled model or a file (.safetensors, .pth, .ckpt).")
        ),
    ],
    output: Annotated[
        Path,
        option(
            "-o",
            "--output",
            panel=_MAIN,
            metavar="FILE",
            help=("The .onnx file. Nothing is overwritten without --force."),
        ),
    ],
    precision: Annotated[
        FilePrecision,
        option(
            panel=_MAIN,
            help=(
                "Precision of weights and layers; images and results are fp32. int8 is smaller and"
                " faster, but not equal."
            ),
        ),
    ] = FilePrecision.fp32,
    calibrate: Annotated[
        list[Path] | None,
        option(
            "--calibrate",
            panel=_MAIN,
            metavar="PATH",
            help=(
                "For int8: a photograph or a folder of them, like those to be upscaled. Half of"
                " them calibrate the file, the others measure its error. May be given several"
                " times."
            ),
        ),
    ] = None,
    opset: Annotated[
        int,
        option(
            panel=_MAIN,
            metavar="N",
            help=("23 has an attention operator, 20 decomposes it for older runtimes."),
        ),
    ] = 23,
    unchecked: Annotated[
        bool, option("--unchecked", panel=_MAIN, help=("Keep a file that cannot be run here too."))
    ] = False,
    force: Annotated[bool, option("--force", panel=_OUT, help="Replace the file.")] = False,
    quiet: Quiet = False,
    as_json: JsonReport = False,
) -> None:
    """Write a model as an ONNX file for images of any size, and check it.

    ONNX Runtime runs the file at several sizes; it is kept only if its results match PyTorch's.
    """
    with step_printer("exporting", "loading", quiet=quiet) as tell:
        from lowtide.jobs.export.command import export_onnx

        report = export_onnx(
            model,
            output,
            precision=precision.value,
            opset=opset,
            calibrate=calibrate or (),
            force=force,
            unchecked=unchecked,
            progress=tell,
        )
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))
