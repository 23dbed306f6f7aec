"""Command `lowtide train noise`: calibrate the noise of a camera or a scanner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.common_options import Force, JsonReport, output_option
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.jobs.denoise.calibration.settings import CalibrationSettings


@report_errors
@with_settings(CalibrationSettings, "output")
def train_noise(
    output: Annotated[Path, output_option("The noise table, JSON.", panel="Output")],
    force: Force = False,
    as_json: JsonReport = False,
    **settings: Any,
) -> None:
    """Calibrate the noise of a camera or an MRI scanner from its files.

    Flat and dark frames tell shot, read and row noise by photon transfer; pairs of a noisy and a
    clean image, and single noisy images, tell shot noise and the rest. Values have to be linear.
    A series of volumes tells the Rician noise of magnitudes.
    """
    from lowtide.jobs.denoise.calibration.command import train_noise as run

    report = run(output, force=force, **settings)
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))
