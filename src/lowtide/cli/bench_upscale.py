"""Command `lowtide bench upscale`: compare upscaling configurations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.shell import JsonReport, handle_errors, option
from lowtide.core.errors import UsageError
from lowtide.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from lowtide.jobs.bench_upscale import BenchReport, BenchRow

_MAIN, _OUT = "Main", "Output"


@handle_errors
def upscale(
    image: Annotated[Path, typer.Argument(help="An image file; a small one takes less time.")],
    model: Annotated[
        str, option("-m", "--model", panel=_MAIN, help=("A bundled model or a file."))
    ] = "lowtide-x2",
    device: Annotated[str, option(panel=_MAIN, help="auto, cpu, cuda:0, ...")] = "auto",
    budget: Annotated[
        str, option("-b", "--budget", panel=_MAIN, help=("Memory that each configuration may use."))
    ] = "auto",
    only: Annotated[
        list[str] | None,
        option(
            "--only",
            panel=_MAIN,
            metavar="NAME",
            help=(
                "A configuration to run in addition to the reference and the baseline; may be"
                " given several times."
            ),
        ),
    ] = None,
    seams: Annotated[
        bool,
        option(
            "--seams",
            panel=_MAIN,
            help=("Compare tile seams instead: no blending, linear and Hann ramps, and bands."),
        ),
    ] = False,
    tile: Annotated[
        int, option(panel=_MAIN, metavar="PIXELS", help=("Side of the tiles for --seams."))
    ] = 128,
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            panel=_OUT,
            metavar="FILE",
            help=("Plot time and memory of all configurations, .png or .svg."),
        ),
    ] = None,
    as_json: JsonReport = False,
) -> None:
    """Measure time, memory and accuracy of upscaling configurations on this machine.

    Each runs twice in a process of its own, and the second run counts. Nothing is written except
    the plot.
    """
    if seams:
        if plot is not None or only:
            raise UsageError("--seams contradicts --plot and --only", hint="drop them, or --seams")
        _seams(image, model, device, budget, tile, as_json=as_json)
        return
    from lowtide.jobs.bench_upscale import bench

    report = bench(
        image,
        model=model,
        device=device,
        budget=budget,
        only=only or (),
        plot=plot,
        progress=_print_step,
    )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _print(report)


def _seams(image: Path, model: str, device: str, budget: str, tile: int, *, as_json: bool) -> None:
    from rich.table import Table

    from lowtide.jobs.bench_seams import compare_seams

    report = compare_seams(
        image,
        model=model,
        device=device,
        budget=budget,
        tile=tile,
        progress=_print_step,
    )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
        return
    table = Table(
        "blending",
        "overlap",
        "tiles",
        "work",
        "PSNR",
        "PSNR at seams",
        "step error",
        title=f"{report.model}, {report.width}×{report.height} in tiles of {report.tile}",
        caption="PSNR against the whole image; steps across cuts, in levels of 255",
    )
    for row in report.rows:
        table.add_row(
            row.blend,
            str(row.overlap or "–"),
            str(row.tiles) if row.overlap else "–",
            f"{row.work:.2f}×",
            _decibels(row.psnr_db),
            _decibels(row.seam_psnr_db),
            f"{row.step_rms:.4f}",
        )
    _show(table)


def _print_step(what: str) -> None:
    typer.echo(f"running {what}", err=True)


def _decibels(psnr: float | None) -> str:
    return "identical" if psnr is None else f"{psnr:.1f} dB"


def _print(report: BenchReport) -> None:
    from rich.table import Table

    table = Table(
        "configuration",
        "options",
        "speedup",
        "time",
        "CPU use",
        "peak",
        "execution",
        "against lowtide",
        title=f"{report.model}, {report.width}×{report.height} on {report.device}",
    )
    group = ""
    for row in report.rows:
        if row.variant.group != group:
            table.add_section()
            group = row.variant.group
        table.add_row(*_cells(row))
    _show(table)


def _show(table: Table) -> None:
    from rich.console import Console

    Console(width=None if Console().is_terminal else 150).print(table)


def _cells(row: BenchRow) -> tuple[str, ...]:
    if row.error:
        return row.variant.name, row.variant.options, "–", "–", "–", "–", "refused", row.error
    fast = "–" if row.speedup is None else f"{row.speedup:.2f}"
    busy = "–" if row.cpu_utilization is None else f"{row.cpu_utilization:.0%}"
    same = _decibels(row.psnr_db) + (f", at most {row.max_error}" if row.max_error else "")
    return (
        row.variant.name,
        row.variant.options,
        fast,
        format_seconds(row.wall_s),
        busy,
        format_bytes(row.peak_bytes),
        f"{row.execution}, {row.precision}",
        same,
    )
