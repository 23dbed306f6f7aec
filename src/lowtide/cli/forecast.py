"""Commands `lowtide forecast` and `lowtide backtest`: series in a table, and what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.common_options import Force, JsonReport, Quiet, output_option
from lowtide.cli.progress_bar import JobProgressPrinter
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.jobs.forecast.settings import BacktestSettings, ForecastSettings

_ORDER = (
    "data output model horizon horizons quantile_levels split stride samples paths seed intervals"
    " non_negative columns target samples_output plot"
)
Table = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help=(
            "CSV (.gz, .zip), Excel or Parquet; - is standard input. Wide: a column of dates and"
            " one for each series. Long: one of names of series, one of dates, one of values."
        ),
    ),
]
Output = Annotated[Path | None, output_option("File to write.", panel="Output")]


@report_errors
@with_settings(ForecastSettings, _ORDER)
def forecast(
    data: Table,
    output: Output = None,
    force: Force = False,
    as_json: JsonReport = False,
    **settings: Any,
) -> None:
    """Forecast the series of a table: quantiles and sample paths.

    Each series gets the method that was best on what it was not fitted to: simple ones such as
    ETS and Theta where it is short, ridge regressions where it is long. Its bands are of the errors
    that it made there. With -m FOLDER it is one of `lowtide train forecast`, whose paths are drawn
    by diffusion. `lowtide backtest` says how good it is on your data.
    """
    from lowtide.jobs.forecast.command import forecast as run

    made = run(data, output, force=force, **settings)
    if as_json:
        typer.echo(made.report.model_dump_json(indent=2))
        return
    if output is None:
        typer.echo(made.frame.to_csv(index=False), nl=False)
    typer.echo(str(made.report), err=output is None)


@report_errors
@with_settings(BacktestSettings, _ORDER)
def backtest(
    data: Table,
    output: Output = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: JsonReport = False,
    **settings: Any,
) -> None:
    """Score the forecasts of a table's last part, compared with every method.

    The first 70 % of the rows are fitted to, the last 20 % scored: every window of them. Scores are
    of values standardized by the first part. What the forecaster is without each of its parts is
    scored too. With -m FOLDER the trained model is scored, on windows after its training.
    """
    from lowtide.jobs.forecast.backtest import backtest as run

    bar = JobProgressPrinter(quiet=quiet)
    try:
        report = run(data, output, force=force, progress=bar, **settings)
    finally:
        bar.close()
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))
