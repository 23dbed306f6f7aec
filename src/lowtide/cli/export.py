"""Command `lowtide export`: write a model as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.common_options import Force, JsonReport, Quiet, output_option
from lowtide.cli.progress_bar import step_printer
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.jobs.export.settings import ExportSettings


@report_errors
@with_settings(ExportSettings, "model output")
def onnx(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A bundled model or a file (.safetensors, .pth, .ckpt)."
        ),
    ],
    output: Annotated[
        Path, output_option("The .onnx file. Nothing is overwritten without --force.")
    ],
    force: Force = False,
    quiet: Quiet = False,
    as_json: JsonReport = False,
    **settings: Any,
) -> None:
    """Write a model as an ONNX file for images of any size, and check it.

    ONNX Runtime runs the file at several sizes; it is kept only if its results match PyTorch's.
    """
    with step_printer("exporting", "loading", quiet=quiet) as tell:
        from lowtide.jobs.export.command import export_onnx

        report = export_onnx(model, output, force=force, progress=tell, **settings)
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))
