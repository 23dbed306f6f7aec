"""Backtest of a forecaster: scores on the last part of a table, beside simple baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError, UsageError
from lowtide.core.progress import Cancel, Progress, ProgressCallback, check_cancel
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.forecast import fit_forecaster
from lowtide.jobs.forecast_scores import Scores
from lowtide.media.table import TimeTable, read_table
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.windows import forward_fill, targets

if TYPE_CHECKING:
    import pandas as pd

# Shares of train, validation and test, by the name of a split. ETT's are 12, 4 and 4 months.
SPLITS = {"70/10/20": (0.7, 0.1, 0.2), "ett": (12 / 20, 4 / 20, 4 / 20)}
# Bytes of the sample paths that are scored at once, and origins that are predicted at once.
_SAMPLE_BYTES, _ORIGINS = 64 << 20, 256


class HorizonScores(BaseModel):
    """Scores of one horizon, by the name of the method, and the windows they are means of."""

    horizon: int
    windows: int
    scores: dict[str, dict[str, float]]


class BacktestReport(BaseModel):
    """Report of a backtest.

    Scores are of values standardized by the training part, over all windows of the test part, none
    left out. ``mse`` and ``mae`` are of the mean, ``crps`` is the fair one of the samples, ``wql``
    the weighted quantile loss at .1 to .9, ``coverage90`` the share inside the 90 % band, whose
    Winkler score is ``winkler90``.
    """

    schema_version: int = SCHEMA_VERSION
    series: int
    history: int
    frequency: str
    split: str
    train_steps: int
    test_steps: int
    samples: int
    seed: int
    horizons: list[HorizonScores]
    notes: list[str] = []

    def __str__(self) -> str:
        lines = [
            f"{self.series} series, {self.history:,} steps ({self.frequency}): fitted to the first"
            f" {self.train_steps:,}, scored on the last {self.test_steps:,}"
        ]
        for one in self.horizons:
            names = list(next(iter(one.scores.values())))
            lines += ["", f"{one.horizon:,} steps ahead, {one.windows:,} windows", _row("", names)]
            for method, scores in one.scores.items():
                lines.append(_row(method, [_number(scores.get(name)) for name in names]))
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])


def backtest(
    data: str | Path | pd.DataFrame,
    output: str | Path | None = None,
    *,
    horizons: Sequence[int],
    split: str = "70/10/20",
    samples: int = 200,
    columns: Sequence[str] = (),
    frequency: str | None = None,
    seed: int = 0,
    stride: int = 1,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
) -> BacktestReport:
    """Fit to the first part of a table and score the forecasts of its last part.

    Args:
        data: A table as `forecast` takes it.
        output: File of the report, JSON.
        horizons: Steps ahead; each is fitted and scored on its own.
        split: ``"70/10/20"``, or ``"ett"``: 12, 4 and 4 months of 30 days.
        samples: Sample paths of each window.
        columns: Series to score; all by default.
        frequency: pandas' name of the distance of stamps; None finds it.
        seed: Seed of the sample paths.
        stride: Distance of the windows that are scored.
        force: Overwrite ``output``.
        progress: Called as windows are scored.
        cancel: Stops between windows.

    Raises:
        InputError: The table cannot be used or is too short.
        UsageError: An argument is invalid, or ``output`` exists.
        OutputError: The report cannot be written.
    """
    if split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", hint=f"--split {' or '.join(SPLITS)}")
    if not horizons or min(horizons) < 1 or stride < 1 or samples < 2:
        raise UsageError("horizons and strides are at least 1, samples 2", hint="--horizon 96")
    if output is not None and Path(output).exists() and not force:
        raise UsageError(f"{output} already exists", hint="--force overwrites it")
    table = read_table(data, columns=tuple(columns), frequency=frequency)
    train, first, last = _split(table, split)
    report = BacktestReport(
        series=len(table.names),
        history=last,
        frequency=table.grid.frequency,
        split=split,
        train_steps=train,
        test_steps=last - first,
        samples=samples,
        seed=seed,
        horizons=[],
        notes=list(table.notes),
    )
    for horizon in horizons:
        if first + horizon > last:
            raise InputError(
                f"the {last - first:,} steps of the test part are less than {horizon:,}"
            )
        model = fit_forecaster(table, horizon, train)
        origins = np.arange(first, last - horizon + 1, stride)
        scores = _score(table, model, origins, samples, seed, progress, cancel)
        report.horizons.append(scores)
    if output is not None:
        with atomic_output(Path(output)) as part:
            part.write_text(report.model_dump_json(indent=2) + "\n")
    return report


def _split(table: TimeTable, split: str) -> tuple[int, int, int]:
    """Return the steps where training ends, where the test begins and where it ends."""
    steps = len(table.values)
    if split == "ett":
        day = sum(table.grid.stamps[:200].normalize() == table.grid.stamps[0].normalize())
        month = 30 * day
        if steps < 20 * month:
            raise InputError(f"{steps:,} steps are less than the 20 months of the split")
        return 12 * month, 16 * month, 20 * month
    return int(steps * SPLITS[split][0]), steps - int(steps * SPLITS[split][2]), steps


def _score(
    table: TimeTable,
    model: RidgeForecaster,
    origins: np.ndarray,
    samples: int,
    seed: int,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> HorizonScores:
    horizon, values = model.horizon, table.values
    phases, filled = table.grid.phases(), forward_fill(values)
    deviation = model.scaler.deviation
    methods = {name: Scores(deviation) for name in ("naive", "seasonal naive", "ridge")}
    size = max(1, _SAMPLE_BYTES // (8 * samples * horizon * values.shape[1]))
    for start in range(0, len(origins), _ORIGINS):
        check_cancel(cancel)
        chunk = origins[start : start + _ORIGINS]
        steps = chunk[:, None] + np.arange(horizon)
        truth = targets(values, chunk, horizon)
        methods["naive"].add_points(truth, np.repeat(filled[chunk - 1][:, None], horizon, axis=1))
        season = table.grid.season
        ago = chunk[:, None] - season + np.arange(horizon) % season
        methods["seasonal naive"].add_points(truth, filled[ago])
        distribution = model.predict(values, chunk, phases[steps])
        methods["ridge"].add_points(truth, distribution.mean)
        for row in range(0, len(chunk), size):
            part = slice(row, row + size)
            drawn = model.sample(distribution[part], samples, seed=seed)
            methods["ridge"].add_samples(truth[part], drawn)
        if progress is not None:
            done = start + len(chunk)
            progress(Progress("run", f"{horizon} steps ahead", done, len(origins)))
    scores = {name: method.means() for name, method in reversed(methods.items())}
    return HorizonScores(horizon=horizon, windows=len(origins), scores=scores)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:16}" + "".join(f"{cell:>12}" for cell in cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
