"""LDM4TS on ETTh1, 96 steps ahead: beside other joint paths, and without each of its parts.

    python benchmarks/ldm4ts_etth1.py --data FOLDER [--only full] [--fresh]

FOLDER (or the environment variable LOWTIDE_DATA) holds ``series/ETTh1.csv``, which is not part of
the project. A row is a training with the settings that `lowtide train forecast` has without
options, but for the part that is off and the seed, and its scores on every 24th window of the last
4 of 20 months. Without the backbone, mean and scale are the last value and a random walk's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from common import ResultFile, row_parser

from lowtide.jobs.forecast.backtest import split_steps
from lowtide.jobs.forecast.scores import ForecastScoreSums
from lowtide.jobs.forecast.source import fit_forecaster
from lowtide.jobs.forecast.train import make_windows_task, train_forecast
from lowtide.jobs.forecast.trained import DIFFUSION, TrainedForecaster, standardized_values
from lowtide.jobs.train.run import run_training
from lowtide.media.table import read_table
from lowtide.models.forecaster.paths import PATHS, ForecastDistribution, PathSampler
from lowtide.models.forecaster.windows import target_windows
from lowtide.models.ldm4ts.diffusion_paths import DiffusionPathSampler
from lowtide.models.ldm4ts.model import LDM4TSModel, random_walk
from lowtide.training.distributed import ProcessGroup
from lowtide.training.task import TrainTask
from lowtide.training.tasks.forecast_config import ForecastConfig
from lowtide.training.tasks.forecasting import ResidualWindows

ABOUT = (
    "ETTh1 (7 series, hourly), 96 steps ahead, fitted to 12 months and scored on every 24th window"
    " of the last 4 of 20, with 50 samples in 10 sampling steps, values standardized by the 12"
    " months; CRPS is the fair one"
)
HORIZON, LOOK_BACK, STRIDE, SAMPLES, STEPS = 96, 336, 24, 50, 10
GAUSSIAN, NO_BACKBONE = "Gaussian", "without backbone"
# Parts that are switched off in the configuration of the network.
PARTS = {"full": {}, "without views": {"views": False}}
PARTS |= {"without spectrum": {"spectrum": False}, "without temporal": {"temporal": False}}
# In the order of what they are worth to know, should time run out.
ROWS = [
    *(
        f"{name}, {kind}"
        for kind in ("backbone", NO_BACKBONE)
        for name in ("bootstrap", "copula", GAUSSIAN)
    ),
    *(f"full, seed {seed}" for seed in range(3)),
    *(f"{name}, seed {seed}" for seed in range(2) for name in (NO_BACKBONE, *list(PARTS)[1:])),
]


@dataclass
class Judge:
    """The table, its windows to score, and the forecasters that need no training."""

    path: Path

    def __post_init__(self) -> None:
        self.table = read_table(self.path, columns=(), frequency=None)
        self.train, first, last = split_steps(self.table, "ett")
        self.origins = np.arange(first, last - HORIZON + 1, STRIDE)
        self.truth = target_windows(self.table.values, self.origins, HORIZON)
        self.ridge = fit_forecaster(self.table, HORIZON, self.train)
        self.values = standardized_values(self.ridge, self.table)

    @cached_property
    def windows(self) -> ForecastDistribution:
        """Mean and scale in closed form."""
        phases = self.table.grid.phases()
        ahead = phases[self.origins[:, None] + np.arange(HORIZON)]
        return self.ridge.predict(self.table.values, self.origins, ahead)

    @cached_property
    def walks(self) -> ForecastDistribution:
        """The last value, and a random walk's scale, of `LDM4TSModel.forecast`."""
        scaler = self.ridge.scaler
        center, scale = self._walk(self.origins)
        center = np.broadcast_to(center, scale.shape)
        return ForecastDistribution(self.origins, scaler.inverse(center), scale * scaler.deviation)

    @cached_property
    def residuals(self) -> ResidualWindows:
        """What mean and scale in closed form leave."""
        ridge = self.ridge
        return ResidualWindows(self.path, self.values, ridge.origins, ridge.residuals, LOOK_BACK)

    @cached_property
    def walk_residuals(self) -> ResidualWindows:
        """What random walks leave of the windows that the backbone's residuals are of."""
        origins = self.ridge.origins
        center, scale = self._walk(origins)
        varies = scale.min(axis=(1, 2)) > 0
        ahead = target_windows(self.values, origins, HORIZON)
        left = ((ahead - center)[varies] / scale[varies]).astype(np.float32)
        return ResidualWindows(self.path, self.values, origins[varies], left, LOOK_BACK)

    def _walk(self, origins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        contexts = np.stack([self.values[one - LOOK_BACK : one] for one in origins])
        center, scale = random_walk(torch.from_numpy(contexts), HORIZON)
        return center.numpy(), scale.numpy()

    @cached_property
    def usual_energy(self) -> np.ndarray:
        """Energy score [n] of bootstrap paths, which others are compared with."""
        bootstrap = PATHS["bootstrap"](self.ridge.residuals)
        return self._energy(self.windows.sample(bootstrap, SAMPLES, seed=0))

    def _energy(self, drawn: np.ndarray) -> np.ndarray:
        parts = []
        for row in range(len(drawn)):
            one = ForecastScoreSums(self.ridge.scaler.deviation)
            one.add_joint(self.truth[row : row + 1], drawn[row : row + 1])
            parts.append(one.means()["energy"])
        return np.array(parts)

    def score(
        self, windows: ForecastDistribution, sampler: PathSampler, residuals: np.ndarray
    ) -> dict:
        """Scores, and the deviation of samples beside that of the ``residuals`` learned from."""
        drawn = windows.sample(sampler, SAMPLES, seed=0)
        scores = ForecastScoreSums(self.ridge.scaler.deviation)
        scores.add_samples(self.truth, drawn)
        scores.add_joint(self.truth, drawn)
        made = (drawn - windows.mean[:, None]) / windows.scale[:, None]
        gain = self.usual_energy - self._energy(drawn)
        return {
            "windows": len(drawn),
            "samples": SAMPLES,
            "deviation": float(made.std() / residuals.std()),
            **scores.means(),
            "energy_gain": float(gain.mean()),
            "energy_gain_error": float(gain.std() / np.sqrt(len(gain))),
        }


class StandalonePaths:
    """Residual paths of `LDM4TSModel.forecast`, which has the same numbers for all windows."""

    def __init__(self, model: LDM4TSModel, values: np.ndarray) -> None:
        self._model, self._values = model, values

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        known = torch.from_numpy(self._values[origin - LOOK_BACK : origin])[None]
        center, scale = random_walk(known, HORIZON)
        made = self._model.forecast(known, len(paths), seed=seed, steps=STEPS)[:, 0]
        paths[:] = ((made - center) / scale).numpy()


def config_of(path: Path, name: str, seed: int) -> ForecastConfig:
    """The configuration of a row, all else as by default."""
    values = {
        "name": name.replace(" ", "-"),
        "horizons": [HORIZON],
        "manual_seed": seed,
        "datasets": {"train": {"table": str(path), "split": "ett"}},
        "network": PARTS.get(name, {}),
    }
    return ForecastConfig.from_values(values)


def trained_row(judge: Judge, name: str, seed: int, folder: Path) -> dict:
    """Train with one part off, and score; the Gaussian of its latents is scored beside it."""
    config, started = config_of(judge.path, name, seed), time.process_time()
    if name == NO_BACKBONE:
        windows, residuals = judge.walks, judge.walk_residuals.residuals

        def make_task(config: ForecastConfig, processes: ProcessGroup) -> TrainTask:
            left = judge.walk_residuals
            return make_windows_task(config, judge.table, left, processes, save=_save)

        report = run_training(config, make_task, folder, device="cpu")
        model = LDM4TSModel.load(str(report.best_weights))
        sampler: PathSampler = StandalonePaths(model, judge.values)
    else:
        windows, residuals = judge.windows, judge.ridge.residuals
        train_forecast(config, folder, device="cpu")
        trained = TrainedForecaster.load(folder / config.name)
        model, sampler = trained.denoiser, trained.sampler(DIFFUSION, judge.table, HORIZON, STEPS)
    seconds = round(time.process_time() - started, 1)
    lines = (folder / config.name / "log.jsonl").read_text().splitlines()
    best = min(
        (row for row in map(json.loads, lines) if "error_share" in row),
        key=lambda row: row["error_share"],
    )
    return {
        "train_s": seconds,
        "steps": config.train.total_iter,
        "best_step": best["step"],
        "error_share": best["error_share"],
        "strength": float(model.strength),
        **judge.score(windows, sampler, residuals),
    }


def _save(path: Path, network: torch.nn.Module) -> Path:
    assert isinstance(network, LDM4TSModel)
    network.save(path)
    return path


def untrained_row(judge: Judge, name: str, kind: str) -> dict:
    """Paths that need no training: those that occurred, a copula, or the Gaussian of latents."""
    walks = kind == NO_BACKBONE
    windows = judge.walks if walks else judge.windows
    left = judge.walk_residuals if walks else judge.residuals
    if name != GAUSSIAN:
        return judge.score(windows, PATHS[name](left.residuals), left.residuals)
    config = config_of(judge.path, "full", 0)
    model = LDM4TSModel(
        horizons=(HORIZON,), variables=len(judge.table.names), diffusion=False, device="cpu"
    )
    trained, _ = left.split(config.datasets.train.validation_share)
    model.fit_autoencoder(torch.from_numpy(trained.residuals))
    sampler = DiffusionPathSampler(model.eval(), judge.values, STEPS)
    return judge.score(windows, sampler, left.residuals)


def main() -> None:
    """Measure the rows that are missing."""
    parser = row_parser(__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("LOWTIDE_DATA"))
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("--data or LOWTIDE_DATA is needed")
    packages = ("pandas", "scoringrules", "accelerate")
    result = ResultFile("ldm4ts_etth1", about=ABOUT, fresh=arguments.fresh, packages=packages)
    missing = [row for row in ROWS if arguments.only in row and not result.has(row)]
    if not missing:
        return
    judge = Judge(Path(arguments.data) / "series" / "ETTh1.csv")
    for row in missing:
        name, _, which = row.partition(", ")
        if which.startswith("seed "):
            with tempfile.TemporaryDirectory() as folder:
                figures = trained_row(judge, name, int(which.split()[1]), Path(folder))
        else:
            figures = untrained_row(judge, name, which)
        result.add(row, **figures)


if __name__ == "__main__":
    main()
