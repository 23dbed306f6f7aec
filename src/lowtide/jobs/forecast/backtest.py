"""Backtest of a forecaster: scores on the last part of a table, compared with baselines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import numpy as np

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError, UsageError
from lowtide.core.progress import Cancel, Progress, ProgressCallback, raise_if_cancelled
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.forecast.backtest_methods import (
    BacktestMethod,
    FittedMethods,
    fit_backtest_methods,
)
from lowtide.jobs.forecast.command import (
    NAMES,
    named_outputs,
    require_outputs,
    require_paths,
    require_room_for_paths,
)
from lowtide.jobs.forecast.report import BacktestReport, HorizonScores
from lowtide.jobs.forecast.scores import ForecastScoreSums, load_scoringrules
from lowtide.jobs.forecast.settings import BacktestKeywords, BacktestSettings
from lowtide.jobs.forecast.trained import TrainedForecaster, without_attention_warnings
from lowtide.media.table import read_table
from lowtide.media.table_frames import TableData
from lowtide.media.time_table import TimeTable
from lowtide.memory.process_memory import available_host_bytes, failing_beyond_container
from lowtide.models.forecaster.paths import ForecastDistribution
from lowtide.models.forecaster.windows import target_windows

# Shares of the rows of the split 70/10/20.
_TRAIN, _TEST = 0.7, 0.2
# Bytes of the sample paths that are scored at once, and origins that are predicted at once.
_SAMPLE_BYTES, _ORIGINS = 64 << 20, 256
# Windows and samples of joint scores, whose cost grows with the square of the samples.
_JOINT_WINDOWS, _JOINT_SAMPLES = 512, 100
# With diffusion, which takes long: the distance of those windows, and their samples.
_DIFFUSION_STRIDE, _DIFFUSION_SAMPLES = 24, 50


@show_keywords(BacktestSettings, BacktestKeywords)
@without_attention_warnings()
def backtest(
    data: TableData,
    output: str | Path | None = None,
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[BacktestKeywords],
) -> BacktestReport:
    """Fit to the first part of a table and score the forecasts of its last part.

    Of a trained model the paths of diffusion are scored too, on every 24th window with at most 50
    samples, as are then all joint scores.

    Args:
        data: A table as `forecast` takes it.
        output: File of the report, JSON.
        force: Overwrite files that exist.
        progress: Called as windows are scored.
        cancel: Stops between windows.
        settings: How the table is read, model, horizons and all else, as fields of
            `BacktestSettings`. All methods and ways of paths are scored beside those that are
            named; of several series the ``target`` alone.

    Raises:
        InputError: The table cannot be used or is too short.
        ModelError: A file of the folder is damaged.
        UsageError: An argument is invalid, the model has seen the last part, or a file exists.
        OutputError: A file cannot be written.
    """
    chosen = BacktestSettings.of(**settings)
    require_paths(chosen)
    # Here, as far below a limit as can be: OpenBLAS, which it imports, would wait for memory.
    load_scoringrules()
    reports = named_outputs(output)
    require_outputs(data, reports, chosen.plot, force=force)
    for path in reports:
        if path.suffix.lower() not in ("", ".json"):
            raise UsageError(f"{path}: reports are .json files", hint=f"-o {path.stem}.json")
    table, trained, steps = _read(data, chosen)
    train, first, last = steps
    place = table.place_of_target(chosen.target)
    require_room_for_paths(chosen.samples, max(chosen.wanted), len(table.names))
    few = min(chosen.samples, _JOINT_SAMPLES if trained is None else _DIFFUSION_SAMPLES)
    scoring = _Scoring(table, place, steps[1:], chosen.stride, (chosen.samples, few), chosen.seed)
    report = BacktestReport(
        model=str(chosen.model),
        until=None if trained is None else trained.facts.until,
        series=len(scoring.names),
        history=last,
        frequency=table.grid.frequency,
        split=chosen.split,
        train_steps=train,
        test_steps=last - first,
        samples=chosen.samples,
        seed=chosen.seed,
        horizons=[],
        notes=list(table.notes),
    )
    for horizon in chosen.wanted:
        with failing_beyond_container():
            fitted = fit_backtest_methods(
                table, horizon, train, str(chosen.model), chosen.paths, trained
            )
            report.notes += [text for text in fitted.notes if text not in report.notes]
            report.horizons.append(
                scoring.of_horizon(fitted, horizon, trained is not None, progress, cancel)
            )
    report.notes += [] if trained is None else trained.denoiser.notes
    if output is not None:
        with atomic_output(Path(output), replace=force) as part:
            part.write_text(report.model_dump_json(indent=2) + "\n")
    if chosen.plot is not None:
        from lowtide.jobs.forecast.plot import plot_pit

        plot_pit(chosen.plot, report, replace=force)
    return report


def _read(
    data: TableData, chosen: BacktestSettings
) -> tuple[TimeTable, TrainedForecaster | None, tuple[int, int, int]]:
    """Return the table, the trained model if it is one, and the steps of `split_steps`."""
    model, longest = str(chosen.model), max(chosen.wanted)
    if model in NAMES:
        trained, room = None, available_host_bytes()
        table = read_table(data, chosen, room=room)
    else:
        trained = TrainedForecaster.load(Path(model))
        trained.require_horizon(longest)
        table = trained.read_table(data, chosen)
    train, first, last = split_steps(table, chosen.split)
    if longest > last - first:
        raise InputError(f"the {last - first:,} steps of the test part are less than {longest:,}")
    if trained is None:
        unseen = np.isfinite(table.values[:train]).sum(axis=0) == 0
        table = table.without(unseen, "without a value in the first part, which is fitted to")
    else:
        trained.require_unseen(table, first)
    return table, trained, (train, first, last)


def split_steps(table: TimeTable, split: str) -> tuple[int, int, int]:
    """Return the steps where training ends, where the test begins and where it ends."""
    steps = len(table.values)
    if split == "ett":
        day = table.grid.steps_per_day
        if day is None:
            raise UsageError(
                f"the split ett is of days, and {table.grid.frequency} is no part of one",
                hint="--split 70/10/20",
            )
        month = 30 * day
        if steps < 20 * month:
            raise InputError(f"{steps:,} steps are less than the 20 months of the split")
        return 12 * month, 16 * month, 20 * month
    return int(steps * _TRAIN), steps - int(steps * _TEST), steps


def _joint_stride(windows: int, stride: int, *, diffusion: bool) -> int:
    """Return the distance of joint scores' windows among those that are ``stride`` steps apart."""
    usual = -(-windows // _JOINT_WINDOWS)
    return max(usual, -(-_DIFFUSION_STRIDE // stride)) if diffusion else usual


class _Scoring:
    """Scores of several methods on the same windows of a table, of all series or that at a place.

    Args:
        table: The series.
        place: That of the only one to score.
        part: Steps where the part to score begins and ends.
        stride: Distance of windows.
        samples: Paths that single steps are scored with, and those of joint scores.
        seed: Seed of the paths.
    """

    def __init__(
        self,
        table: TimeTable,
        place: int | None,
        part: tuple[int, int],
        stride: int,
        samples: tuple[int, int],
        seed: int,
    ) -> None:
        self._scored = slice(None) if place is None else slice(place, place + 1)
        self.names = table.names[self._scored]
        self._values, self._variables = table.values[:, self._scored], len(table.names)
        self._part, self._stride = part, stride
        (self._samples, self._few), self._seed = samples, seed

    def of_horizon(
        self,
        fitted: FittedMethods,
        horizon: int,
        diffusion: bool,
        progress: ProgressCallback | None,
        cancel: Cancel,
    ) -> HorizonScores:
        """Return the scores of methods; with ``diffusion`` fewer windows have joint ones."""
        first, last = self._part
        origins = np.arange(first, last - horizon + 1, self._stride)
        distance = _joint_stride(len(origins), self._stride, diffusion=diffusion)
        joint = np.arange(len(origins)) % distance == 0
        deviation, unit = fitted.deviation[self._scored], fitted.unit[self._scored]
        scores = {method.name: ForecastScoreSums(deviation, unit) for method in fitted.methods}
        for start in range(0, len(origins), _ORIGINS):
            part = slice(start, start + _ORIGINS)
            made: dict[Callable, ForecastDistribution] = {}
            for method in fitted.methods:
                raise_if_cancelled(cancel)
                where = joint[part]
                if method.predict in made:
                    windows = made[method.predict]
                elif method.single_steps == "joint":
                    windows, where = method.predict(origins[part][where]), where[where]
                else:
                    windows = made[method.predict] = method.predict(origins[part])
                self._add(scores[method.name], method, windows, where)
            if progress is not None:
                done = min(start + _ORIGINS, len(origins))
                progress(Progress("run", f"{horizon} steps ahead", done, len(origins)))
        return HorizonScores(
            horizon=horizon,
            windows=len(origins),
            joint_windows=int(joint.sum()),
            joint_samples=self._few,
            paths=fitted.paths,
            path_energy=fitted.path_energy,
            chosen=fitted.chosen,
            scores={name: one.means() for name, one in scores.items()},
            by_series={
                name: dict(zip(self.names, found, strict=True))
                for name, one in scores.items()
                if any(found := one.of_series())
            },
            pit={name: shares for name, one in scores.items() if (shares := one.pit())},
        )

    def _add(
        self,
        scores: ForecastScoreSums,
        method: BacktestMethod,
        windows: ForecastDistribution,
        joint: np.ndarray,
    ) -> None:
        """Add the scores of ``windows``; ``joint`` [n] says which of them have joint scores."""
        horizon = windows.mean.shape[1]
        truth = target_windows(self._values, windows.origins, horizon)
        rows = max(1, _SAMPLE_BYTES // (8 * self._samples * horizon * self._variables))
        if method.single_steps == "all":
            scores.add_points(truth, windows.mean[..., self._scored])
            for start in range(0, len(truth), rows):
                part = slice(start, start + rows)
                drawn = windows[part].sample(method.sampler, self._samples, seed=self._seed)
                scores.add_samples(truth[part], drawn[..., self._scored])
        for row in np.flatnonzero(joint).tolist():
            part = slice(row, row + 1)
            drawn = windows[part].sample(method.sampler, self._few, seed=self._seed)
            drawn = drawn[..., self._scored]
            if method.single_steps == "joint":
                scores.add_points(truth[part], windows[part].mean[..., self._scored])
                scores.add_samples(truth[part], drawn)
            scores.add_joint(truth[part], drawn)
