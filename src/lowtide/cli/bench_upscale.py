"""`lowtide bench upscale`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.shell import guarded, option
from lowtide.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.jobs.bench_upscale import BenchReport, Row

_MAIN, _OUT = "Main", "Output"


@guarded
def upscale(
    image: Annotated[Path, typer.Argument(help="An image file; a small one takes less long.")],
    model: Annotated[str, option("-m", "--model", panel=_MAIN, help=(
        "A bundled model or a file."))] = "lowtide-x2",
    device: Annotated[str, option(panel=_MAIN, help="auto, cpu, cuda:0, ...")] = "auto",
    budget: Annotated[str, option("-b", "--budget", panel=_MAIN, help=(
        "Memory that each way may use."))] = "auto",
    only: Annotated[list[str] | None, option("--only", panel=_MAIN, metavar="NAME", help=(
        "A way to run besides the reference and the baseline; may be given several times."
    ))] = None,
    plot: Annotated[Path | None, option("--plot", panel=_OUT, metavar="FILE", help=(
        "Draw time and memory of all ways, .png or .svg."))] = None,
    as_json: Annotated[bool, option("--json", panel=_OUT,
                                    help="Print the report as JSON on stdout.")] = False,
) -> None:  # fmt: skip
    """Time, memory and accuracy of every way to upscale an image on this machine.

    Each runs twice in a process of its own, and the second time counts. Nothing is written but
    the picture.
    """
    from lowtide.jobs.bench_upscale import bench

    report = bench(
        image, model=model, device=device, budget=budget, only=only or (), plot=plot,
        progress=lambda name: typer.echo(f"running {name}", err=True),
    )  # fmt: skip
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "way", "options", "×", "time", "busy", "peak", "execution", "against lowtide",
        title=f"{report.model}, {report.width}×{report.height} on {report.device}",
    )  # fmt: skip
    group = ""
    for row in report.rows:
        if row.way.group != group:
            table.add_section()
            group = row.way.group
        table.add_row(*_cells(row))
    Console(width=None if Console().is_terminal else 150).print(table)


def _cells(row: Row) -> tuple[str, ...]:
    if row.refused:
        return row.way.name, row.way.words, "–", "–", "–", "–", "refused", row.refused
    fast = "–" if row.times_as_fast is None else f"{row.times_as_fast:.2f}"
    busy = "–" if row.busy is None else f"{row.busy:.0%}"
    same = "the same" if row.psnr_db is None else f"{row.psnr_db:.1f} dB, at most {row.largest}"
    return (
        row.way.name, row.way.words, fast, format_seconds(row.wall_s), busy,
        format_bytes(row.peak_bytes), f"{row.execution}, {row.precision}", same,
    )  # fmt: skip
