"""Settings of forecasts and backtests, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from lowtide.core.errors import UsageError
from lowtide.core.option import MOST_COUNT, Count, Option, Seed
from lowtide.jobs.engine.settings import JobSettings
from lowtide.media.table_options import TableKeywords, TableOptions

_MODEL, _TABLE, _OUT = "Forecast", "Table", "Output"
_STEPS = Option(_MODEL, metavar="STEPS", example=24)
_FILE = Option(_OUT, metavar="FILE")
DEFAULT_LEVELS = (0.1, 0.5, 0.9)
PathsName = Literal["auto", "bootstrap", "copula", "independent", "diffusion"]
SplitName = Literal["70/10/20", "ett"]


class SeriesKeywords(TableKeywords, total=False):
    """Keywords of both calls: the fields of `SeriesSettings`."""

    model: str | Path
    horizon: int | None
    horizons: Sequence[int]
    samples: int
    paths: PathsName
    seed: int
    plot: str | Path | None


class ForecastKeywords(SeriesKeywords, total=False):
    """Keywords of `forecast`: the fields of `ForecastSettings`."""

    quantile_levels: Sequence[float] | None
    intervals: Sequence[float]
    non_negative: bool | None
    samples_output: str | Path | None


class BacktestKeywords(SeriesKeywords, total=False):
    """Keywords of `backtest`: the fields of `BacktestSettings`."""

    split: SplitName
    stride: int


@dataclass(frozen=True, kw_only=True)
class SeriesSettings(TableOptions, JobSettings):
    """Settings of forecasts and of backtests: how the table is read, by which model and how far.

    Attributes:
        model: auto takes the best method of each series on what it was not fitted to: mean (of the
            next three), naive, ets, theta, plain-ridge, dlinear, ridge. Or one of these, or a
            folder of lowtide train forecast.
        horizon: Steps to forecast.
        horizons: Several horizons: 24,96.
        samples: Sample paths.
        paths: How steps and series move together: bootstrap, copula, independent; auto takes the
            best on blocked folds. With -m FOLDER also diffusion, its auto.
        seed: Seed of the sample paths.
        plot: Picture of what was found.
        day_first: What stands first in dates: 31/1/2026 or 1/31/2026. Default: found.
    """

    model: Annotated[str | Path, Option(_MODEL, flags=("-m", "--model"), metavar="NAME")] = "auto"
    horizon: Annotated[Count | None, _STEPS] = None
    horizons: Annotated[
        tuple[Count, ...], Option(_MODEL, metavar="STEPS,...", example="24,96")
    ] = ()
    samples: Annotated[int, Ge(2), Le(MOST_COUNT), Option(_MODEL)] = 200
    paths: Annotated[PathsName, Option(_MODEL, metavar="NAME")] = "auto"
    seed: Annotated[Seed, Option(_MODEL)] = 0
    day_first: Annotated[bool | None, Option(_TABLE, flags=("--day-first/--month-first",))] = None
    plot: Annotated[Path | None, _FILE] = None

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        if not self.wanted:
            raise UsageError("no horizon is given", hint="--horizon 24")

    @property
    def wanted(self) -> tuple[int, ...]:
        """All horizons that are asked for."""
        return (*self.horizons, *(() if self.horizon is None else (self.horizon,)))


@dataclass(frozen=True, kw_only=True)
class ForecastSettings(SeriesSettings):
    """Settings of a forecast; of several horizons the longest covers all.

    Attributes:
        quantile_levels: Levels of quantiles: .1,.5,.9, or .5 beside --interval.
        intervals: Bands by what is inside: 80,95 writes lo-95, lo-80, hi-80 and hi-95.
        non_negative: Nothing is below 0; by default of series that never were.
        samples_output: File of the sample paths.
        plot: Picture of history and bands.
    """

    quantile_levels: Annotated[
        tuple[Annotated[float, Gt(0), Lt(1)], ...] | None,
        Option(_MODEL, flags=("--levels",), metavar="LEVEL,...", example="0.1,0.5,0.9"),
    ] = None
    intervals: Annotated[
        tuple[Annotated[float, Gt(0), Lt(100)], ...],
        Option(_MODEL, flags=("--interval",), metavar="PERCENT,...", example="80,95"),
    ] = ()
    non_negative: Annotated[bool | None, Option(_MODEL)] = None
    samples_output: Annotated[Path | None, _FILE] = None

    def check(self) -> None:
        """Raise `UsageError` for settings that contradict each other."""
        super().check()
        if self.quantile_levels == ():
            raise UsageError("there are no levels of quantiles", hint="--levels 0.1,0.5,0.9")

    @property
    def bands(self) -> tuple[float, ...]:
        """Percentages inside bands, ascending."""
        return tuple(sorted(set(self.intervals)))

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of quantiles, ascending."""
        if self.quantile_levels is None:
            return (0.5,) if self.intervals else DEFAULT_LEVELS
        return tuple(sorted(set(self.quantile_levels)))


@dataclass(frozen=True, kw_only=True)
class BacktestSettings(SeriesSettings):
    """Settings of a backtest; each horizon is fitted and scored on its own.

    Attributes:
        split: 70/10/20 of the rows, or ett: 12, 4 and 4 months of 30 days.
        stride: Distance of the windows scored.
        plot: Picture of PIT histograms, level where right.
    """

    split: Annotated[SplitName, Option(_TABLE)] = "70/10/20"
    stride: Annotated[Count, Option(_MODEL)] = 1
