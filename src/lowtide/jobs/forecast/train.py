"""Train a forecaster within a budget: the job of `lowtide train forecast`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.forecast.backtest import split_steps
from lowtide.jobs.forecast.source import fit_forecaster
from lowtide.jobs.forecast.trained import (
    TrainedForecasterFacts,
    save_parts,
    standardized_values,
    without_attention_warnings,
)
from lowtide.jobs.train.run import RunOptions, TrainReport, run_training
from lowtide.media.table import read_table
from lowtide.media.table_options import TableKeywords, TableOptions
from lowtide.media.time_table import TimeTable
from lowtide.memory.process_memory import available_host_bytes
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.ldm4ts.model import LDM4TSModel
from lowtide.training.data.batches import BatchLoader
from lowtide.training.distributed import ProcessGroup
from lowtide.training.setup import limited_build
from lowtide.training.state import collect_file_facts
from lowtide.training.task import TrainTask, Validator
from lowtide.training.tasks.forecast_config import ForecastConfig, TableDataSection
from lowtide.training.tasks.forecasting import (
    DENOISER,
    NoisyWindows,
    ResidualWindows,
    VelocityValidator,
    make_denoising_task,
)

if TYPE_CHECKING:
    from torch import nn

# Of hours, where no table says.
_USUAL_SEASON = 24
# Share of the error of held-out paths below which a gain is none.
_LEAST_GAIN = 1e-3


@without_attention_warnings()
def train_forecast(
    config: str | Path | ForecastConfig,
    output: str | Path = "experiments",
    **options: Unpack[RunOptions],
) -> TrainReport:
    """Train the forecaster of ``config`` in ``output``/name, which `lowtide.forecast` takes.

    The mean and the scale are fitted in closed form; the denoiser of residual paths is trained for
    as long as it gains, by errors on windows that are held out. Resuming, budgets and processes are
    as in `train_sr`.

    Args:
        config: A configuration, or its file.
        output: Parent of the run's folder.
        options: As `RunOptions`.

    Raises:
        UsageError, InputError: The configuration or the table cannot be used, or the folder holds
            files that are not of a training of that name.
        BudgetError: No split of the batch fits the budget.
        OutputError: A file cannot be written.
        NotFiniteError: A loss or a gradient is not finite.
        Cancelled: ``cancel`` was set.
    """
    chosen = config if isinstance(config, ForecastConfig) else ForecastConfig.from_file(config)
    folder = Path(output) / chosen.name
    tasks: list[TrainTask] = []

    def make_task(config: ForecastConfig, processes: ProcessGroup) -> TrainTask:
        tasks.append(make_forecast_task(config, processes, folder=folder))
        return tasks[0]

    report = run_training(chosen, make_task, output, **options)
    denoiser = tasks[0].networks[DENOISER]
    assert isinstance(denoiser, LDM4TSModel)
    report.warnings += denoiser.notes
    if report.best_score is not None:
        report.notes.append(_gain(report.best_score))
    return report


def _gain(share: float) -> str:
    """Return what training added, by the ``share`` of the closed form's error that is left."""
    if share > 1 - _LEAST_GAIN:
        return "training added nothing: lowtide forecast with --paths copula is as good without it"
    return f"training took {1 - share:.1%} off the error of held-out paths in closed form"


def make_forecast_task(
    config: ForecastConfig, processes: ProcessGroup, *, folder: Path = Path()
) -> TrainTask:
    """Build the task of a configuration, with the data of one of ``processes``.

    ``folder`` is that of the run, in which nothing is written before weights are saved.
    """
    data = config.datasets.train
    table = read_table(data.table, reading_options(data), room=available_host_bytes())
    steps = len(table.values) if data.split == "all" else split_steps(table, data.split)[0]
    ridge = fit_forecaster(table, config.horizon, steps)
    saver = _Saver(folder, _facts(config, table, steps), ridge)
    return make_windows_task(config, table, _windows(config, table, ridge), processes, save=saver)


def reading_options(data: TableDataSection) -> TableOptions:
    """Return how the table of a configuration is read."""
    named = TableKeywords.__annotations__
    return TableOptions(**{name: getattr(data, name) for name in named})


def make_windows_task(
    config: ForecastConfig,
    table: TimeTable,
    windows: ResidualWindows,
    processes: ProcessGroup,
    *,
    save: Callable[[Path, nn.Module], Path],
) -> TrainTask:
    """Build the task of training a denoiser on ``windows`` of a table, whatever left them.

    ``save`` writes a network to a file and returns it.
    """
    import torch

    data = config.datasets.train
    trained, validated = windows.split(data.validation_share)
    denoiser = _make_denoiser(config, len(table.names), table.grid.season)
    denoiser.fit_autoencoder(torch.from_numpy(trained.residuals))
    return make_denoising_task(
        config,
        denoiser,
        _batches(config, trained, denoiser, processes),
        save=save,
        make_validator=lambda _, device: _validator(config, validated, device),
        files=collect_file_facts([data.table]),
    )


@without_attention_warnings()
def make_task_of_any_table(
    config: ForecastConfig, processes: ProcessGroup, *, series: int
) -> TrainTask:
    """Build the task of a table of so many series, which is not read: to be planned, not run."""
    denoiser = _make_denoiser(config, series, _USUAL_SEASON)
    look_back = config.network.look_back
    window = ResidualWindows(
        config.datasets.train.table,
        np.zeros((look_back, series), np.float32),
        np.array([look_back]),
        np.zeros((1, config.horizon, series), np.float32),
        look_back,
    )
    return make_denoising_task(
        config,
        denoiser,
        _batches(config, window, denoiser, processes),
        save=lambda path, network: path,
        make_validator=lambda folder, device: None,
        files={},
    )


def _batches(
    config: ForecastConfig,
    windows: ResidualWindows,
    denoiser: LDM4TSModel,
    processes: ProcessGroup,
) -> BatchLoader:
    return BatchLoader(
        NoisyWindows(windows, denoiser.latent_shape, config.network.diffusion_steps),
        batch=config.datasets.train.batch_size_per_gpu * processes.world_size,
        shard=(processes.rank, processes.world_size),
        seed=config.manual_seed,
    )


class _Saver:
    """Writer of weights, and with the first of them of all else that a forecast needs."""

    def __init__(self, folder: Path, facts: TrainedForecasterFacts, ridge: RidgeForecaster) -> None:
        self._folder, self._facts, self._ridge = folder, facts, ridge
        self._began = False

    def __call__(self, path: Path, network: nn.Module) -> Path:
        """Write the weights of ``network`` to ``path`` and return it; raises `OutputError`."""
        assert isinstance(network, LDM4TSModel)
        if not self._began:
            save_parts(self._folder, self._facts, self._ridge)
            self._began = True
        network.save(path)
        return path


def _windows(config: ForecastConfig, table: TimeTable, ridge: RidgeForecaster) -> ResidualWindows:
    look_back, path = config.network.look_back, config.datasets.train.table
    seen = ridge.origins >= look_back
    if not seen.any():
        raise InputError(
            f"{path}: no window has {look_back:,} steps before it",
            hint="a shorter network.look_back",
        )
    values = standardized_values(ridge, table)
    return ResidualWindows(path, values, ridge.origins[seen], ridge.residuals[seen], look_back)


def _make_denoiser(config: ForecastConfig, series: int, season: int) -> LDM4TSModel:
    network = config.network.model_dump()
    network["frequency"] = network.pop("spectrum")
    if config.network.autoencoder is not None:
        network["autoencoder"] = config.network.autoencoder.resolve()
    # A table without a season is folded into a square.
    usual = season if season > 1 else max(2, math.isqrt(config.horizon))
    network["period"] = network["period"] or usual
    with limited_build("network"):
        return LDM4TSModel(
            horizons=tuple(config.horizons),
            variables=series,
            seed=config.manual_seed,
            **network,
        )


def _facts(config: ForecastConfig, table: TimeTable, steps: int) -> TrainedForecasterFacts:
    return TrainedForecasterFacts(
        name=config.name,
        columns=table.names,
        frequency=table.grid.frequency,
        season=table.grid.season,
        phases=int(table.grid.phases()[:steps].max()) + 1,
        horizons=tuple(config.horizons),
        split=config.datasets.train.split,
        until=table.grid.label(steps - 1),
    )


def _validator(config: ForecastConfig, windows: ResidualWindows, device: str) -> Validator:
    return VelocityValidator(config, windows, device)
