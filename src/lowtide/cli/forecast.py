"""Commands `lowtide forecast` and `lowtide backtest`: series in a table, and what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.progress_bar import ProgressLine
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import handle_errors, option
from lowtide.core.errors import UsageError
from lowtide.media.table_options import TableOptions, names_of

_MODEL, _TABLE, _OUT = "Forecast", "Table", "Output"
_ORDER = "data output model horizon horizons levels split stride samples paths seed columns target"

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help=(
            "CSV (.gz, .zip), Excel or Parquet; - is standard input. Wide: a column of dates and"
            " one for each series. Long: one of names of series, one of dates, one of values."
        ),
    ),
]
Horizon = Annotated[int | None, option(panel=_MODEL, metavar="STEPS", help="Steps to forecast.")]
Horizons = Annotated[
    str, option(panel=_MODEL, metavar="STEPS,...", help="Several horizons: 24,96.")
]
Samples = Annotated[int, option(panel=_MODEL, help="Sample paths.")]
Paths = Annotated[
    str,
    option(
        panel=_MODEL,
        metavar="NAME",
        help=(
            "How steps and series move together: bootstrap, copula, independent; auto takes the"
            " best on blocked folds. With -m FOLDER also diffusion, its auto."
        ),
    ),
]
Model = Annotated[
    str,
    option(
        "-m",
        "--model",
        panel=_MODEL,
        metavar="NAME",
        help=(
            "auto takes the best method of each series on what it was not fitted to: mean (of the"
            " next three), naive, ets, theta, plain-ridge, dlinear, ridge. Or one of these, or a"
            " folder of lowtide train forecast."
        ),
    ),
]
Seed = Annotated[int, option(panel=_MODEL, help="Seed of the sample paths.")]
DayFirst = Annotated[
    bool | None,
    option(
        "--day-first/--month-first",
        panel=_TABLE,
        help="What stands first in dates: 31/1/2026 or 1/31/2026. Default: found.",
    ),
]
Output = Annotated[
    Path | None, option("-o", "--output", panel=_OUT, metavar="FILE", help="File to write.")
]
Force = Annotated[bool, option("--force", panel=_OUT, help="Overwrite files that exist.")]
AsJson = Annotated[bool, option("--json", panel=_OUT, help="Print the report as JSON on stdout.")]


@handle_errors
@with_settings(TableOptions, _ORDER)
def forecast(
    data: Data,
    output: Output = None,
    model: Model = "auto",
    horizon: Horizon = None,
    horizons: Horizons = "",
    levels: Annotated[
        str | None,
        option(
            panel=_MODEL,
            metavar="LEVEL,...",
            help="Levels of quantiles: .1,.5,.9, or .5 beside --interval.",
        ),
    ] = None,
    interval: Annotated[
        str,
        option(
            panel=_MODEL,
            metavar="PERCENT,...",
            help="Bands by what is inside: 80,95 writes lo-95, lo-80, hi-80 and hi-95.",
        ),
    ] = "",
    non_negative: Annotated[
        bool | None,
        option(
            "--non-negative/--no-non-negative",
            panel=_MODEL,
            help="Nothing is below 0; by default of series that never were.",
        ),
    ] = None,
    samples: Samples = 200,
    paths: Paths = "auto",
    seed: Seed = 0,
    day_first: DayFirst = None,
    samples_output: Annotated[
        Path | None, option(panel=_OUT, metavar="FILE", help="File of the sample paths.")
    ] = None,
    plot: Annotated[
        Path | None, option(panel=_OUT, metavar="FILE", help="Picture of history and bands.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    **reading: Any,
) -> None:
    """Forecast the series of a table: quantiles and sample paths.

    Each series gets the method that was best on what it was not fitted to: simple ones such as
    ETS and Theta where it is short, ridge regressions where it is long. Its bands are of the errors
    that it made there. With -m FOLDER it is one of `lowtide train forecast`, whose paths are drawn
    by diffusion. `lowtide backtest` says how good it is on your data.
    """
    from lowtide.jobs.forecast.command import forecast as run

    made = run(
        data,
        output,
        model=model,
        horizon=horizon,
        horizons=_numbers(horizons, "--horizons", int),
        quantile_levels=None if levels is None else _numbers(levels, "--levels"),
        intervals=_numbers(interval, "--interval"),
        non_negative=non_negative,
        samples=samples,
        paths=paths,
        seed=seed,
        samples_output=samples_output,
        plot=plot,
        force=force,
        **_reading(reading, day_first),
    )
    if as_json:
        typer.echo(made.report.model_dump_json(indent=2))
        return
    if output is None:
        typer.echo(made.frame.to_csv(index=False), nl=False)
    typer.echo(str(made.report), err=output is None)


@handle_errors
@with_settings(TableOptions, _ORDER)
def backtest(
    data: Data,
    output: Output = None,
    model: Model = "auto",
    horizon: Horizon = None,
    horizons: Horizons = "",
    split: Annotated[
        str,
        option(panel=_TABLE, help="70/10/20 of the rows, or ett: 12, 4 and 4 months of 30 days."),
    ] = "70/10/20",
    stride: Annotated[int, option(panel=_MODEL, help="Distance of the windows scored.")] = 1,
    samples: Samples = 200,
    paths: Paths = "auto",
    seed: Seed = 0,
    day_first: DayFirst = None,
    plot: Annotated[
        Path | None,
        option(panel=_OUT, metavar="FILE", help="Picture of PIT histograms, level where right."),
    ] = None,
    force: Force = False,
    quiet: Annotated[bool, option("-q", "--quiet", panel=_OUT, help="No progress.")] = False,
    as_json: AsJson = False,
    **reading: Any,
) -> None:
    """Score the forecasts of a table's last part, compared with every method.

    The first 70 % of the rows are fitted to, the last 20 % scored: every window of them. Scores are
    of values standardized by the first part. What the forecaster is without each of its parts is
    scored too. With -m FOLDER the trained model is scored, on windows after its training.
    """
    from lowtide.jobs.forecast.backtest import backtest as run

    wanted = [*_numbers(horizons, "--horizons", int), *([horizon] if horizon else [])]
    if not wanted:
        raise UsageError("no horizon is given", hint="--horizon 24")
    bar = ProgressLine(quiet=quiet)
    try:
        report = run(
            data,
            output,
            model=model,
            horizons=wanted,
            split=split,
            stride=stride,
            samples=samples,
            paths=paths,
            seed=seed,
            plot=plot,
            force=force,
            progress=bar,
            **_reading(reading, day_first),
        )
    finally:
        bar.close()
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))


def _reading(options: dict[str, Any], day_first: bool | None) -> dict[str, Any]:
    """Return options as keyword arguments; lists of names are words."""
    lists = {name: names_of(options[name]) for name in ("columns", "known")}
    return {**options, **lists, "day_first": day_first}


def _numbers(text: str, name: str, kind: type[int] | type[float] = float) -> list[Any]:
    try:
        return [kind(word) for word in names_of(text)]
    except ValueError as error:
        what, example = ("whole numbers", "24,96") if kind is int else ("numbers", "1,2")
        message = f"{name} {text!r} is no list of {what}"
        raise UsageError(message, hint=f"{name} {example}") from error
