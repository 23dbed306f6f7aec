"""Command `lowtide train noise`: calibrate the noise of a camera or a scanner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.shell import JsonReport, handle_errors, option

_FROM, _OUT = "Files to measure", "Output"
_FOLDER = "DIR"


@handle_errors
def train_noise(
    output: Annotated[
        Path,
        option("-o", "--output", panel=_OUT, metavar="FILE", help="The noise table, JSON."),
    ],
    flat: Annotated[
        Path | None,
        option(
            panel=_FROM,
            metavar=_FOLDER,
            help="Evenly lit frames, two or more of each exposure. Needs --dark.",
        ),
    ] = None,
    dark: Annotated[
        Path | None,
        option(panel=_FROM, metavar=_FOLDER, help="Frames without light, two or more."),
    ] = None,
    pairs: Annotated[
        Path | None,
        option(
            panel=_FROM,
            metavar=_FOLDER,
            help="DIR/noisy and DIR/clean: images of the same names, aligned and equally bright.",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        option(panel=_FROM, metavar=_FOLDER, help="Single noisy images, of their flat parts."),
    ] = None,
    volumes: Annotated[
        Path | None,
        option(
            panel=_FROM,
            metavar="FILE",
            help="NIfTI file of two or more volumes of MRI, each measured against its neighbors.",
        ),
    ] = None,
    iso: Annotated[
        int | None,
        option(
            panel=_FROM,
            metavar="N",
            help="ISO of all files. By default names of files or folders tell it: iso800.",
        ),
    ] = None,
    white_level: Annotated[
        float | None,
        option(
            panel=_FROM,
            metavar="N",
            help="Level at which the sensor saturates; by default the largest of the file's type.",
        ),
    ] = None,
    camera: Annotated[
        str | None,
        option(
            panel=_OUT, metavar="NAME", help="Name of the camera or scanner, by default the file's."
        ),
    ] = None,
    force: Annotated[bool, option("--force", panel=_OUT, help="Replace the file.")] = False,
    as_json: JsonReport = False,
) -> None:
    """Calibrate the noise of a camera or an MRI scanner from its files.

    Flat and dark frames tell shot, read and row noise by photon transfer; pairs of a noisy and a
    clean image, and single noisy images, tell shot noise and the rest. Values have to be linear.
    A series of volumes tells the Rician noise of magnitudes.
    """
    from lowtide.jobs.denoise.calibration.command import train_noise as run

    report = run(
        output,
        flat=flat,
        dark=dark,
        pairs=pairs,
        images=images,
        volumes=volumes,
        iso=iso,
        camera=camera,
        white_level=white_level,
        force=force,
    )
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))
