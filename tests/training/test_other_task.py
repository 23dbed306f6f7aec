"""A task that is not super-resolution: series of two inputs, two networks, trained end to end."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from pydantic import Field
from torch import nn

from lowtide import BudgetError, UsageError
from lowtide.cli.train import TrainKind, train_command
from lowtide.core.philox import philox_generator
from lowtide.jobs.train.memory import plan_step
from lowtide.jobs.train.run import run_training
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.training.data.batches import BatchLoader
from lowtide.training.distributed import SINGLE_PROCESS
from lowtide.training.run_config import (
    DatasetsSection,
    OptimSection,
    RunConfig,
    TrainDataSection,
    TrainSection,
)
from lowtide.training.task import LossTerm, Objective, ObjectiveLosses, TrainTask
from lowtide.training.trainer import Trainer

FEATURES = 3


class SeriesData(TrainDataSection, frozen=True):
    length: int = Field(default=24, ge=2, description="Time steps of a window.")


class SeriesDatasets(DatasetsSection, frozen=True):
    train: SeriesData = SeriesData()


class SeriesTrain(TrainSection, frozen=True):
    optim: OptimSection = OptimSection(lr=1e-2)


class SeriesConfig(RunConfig, frozen=True):
    datasets: SeriesDatasets = SeriesDatasets()
    train: SeriesTrain
    width: int = Field(default=32, ge=1, description="Hidden features.")


class Windows:
    """Sines of a random phase (L, D), their calendar (L, 1), and the values to come (L, D)."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 5

    def path(self, index):
        return Path(f"series-{index}")

    def sample(self, index, generator):
        time = np.arange(2 * self.length)[:, None] + generator.integers(100)
        values = np.sin(time / (3 + index) + np.arange(FEATURES)).astype(np.float32)
        calendar = (time % 7 / 7).astype(np.float32)
        return values[: self.length], calendar[: self.length], values[self.length :]

    def example(self, batch):
        return tuple(
            torch.empty(batch, self.length, features, device="meta")
            for features in (FEATURES, 1, FEATURES)
        )


class Encoder(nn.Module):
    """Blocks over a window and its calendar: a network of two inputs."""

    def __init__(self, width):
        super().__init__()
        self.input = nn.Linear(FEATURES + 1, width)
        blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(nn.Sequential(block) for block in blocks)

    def forward(self, values, calendar):
        hidden = self.input(torch.cat([values, calendar], -1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Forecast(Objective):
    trains = ("encoder", "head")

    def forward(self, networks, batch, step):
        values, calendar, target = batch
        made = networks["head"](networks["encoder"](values, calendar)).float()
        return ObjectiveLosses({"mse": LossTerm((made - target).square().mean())}, (made,))


class Calibrate(Objective):
    """A second pass with its own network, on what the first one made, from step 2 on."""

    trains, start_iter = ("scale",), 2

    def forward(self, networks, batch, step):
        *_, target, made = batch
        assert not made.requires_grad
        spread = networks["scale"](made).float()
        return ObjectiveLosses(
            {"spread": LossTerm((spread - (made - target).abs()).square().mean(), 0.5)}
        )


class Score:
    lower_is_better = True
    conditions: ClassVar = {"metric": "weight"}

    def __call__(self, network, step):
        return {"weight": float(sum(one.square().sum() for one in network.parameters()))}


def save(path, network):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)
    return path


def task_of(config, processes=SINGLE_PROCESS):
    torch.manual_seed(config.manual_seed)
    networks = {
        "encoder": Encoder(config.width),
        "head": nn.Linear(config.width, FEATURES),
        "scale": nn.Linear(FEATURES, FEATURES),
    }
    data = config.datasets.train
    batches = BatchLoader(
        Windows(data.length), batch=data.batch_size_per_gpu, seed=config.manual_seed
    )
    return TrainTask(
        networks,
        dict.fromkeys(networks, config.train.optim),
        [Forecast(), Calibrate()],
        batches,
        save=save,
        make_validator=lambda folder, device: Score(),
        title="windows",
    )


def given(total=6, **train):
    return {
        "name": "series",
        "train": {"total_iter": total, **train},
        "val": {"val_freq": 2},
        "logger": {"print_freq": 1, "save_checkpoint_freq": 3},
    }


def train_series(config, output="experiments", **options):
    return run_training(config, task_of, output, **options)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "series/log.jsonl").read_text().splitlines()]


def test_it_trains_resumes_and_keeps_the_best(tmp_path):
    config = SeriesConfig.from_values(given())
    whole = train_series(config, tmp_path / "whole", device="cpu")
    assert (whole.steps, whole.plan.samples) == (6, "windows")

    class KilledError(Exception):
        pass

    def kill(event):
        if event.step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        train_series(config, tmp_path / "killed", device="cpu", on_step=kill)
    again = train_series(config, tmp_path / "killed", device="cpu")
    assert again.resumed_step == 3
    rows = rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "killed") == rows
    assert Path(again.weights).read_bytes() == Path(whole.weights).read_bytes()
    losses = [row for row in rows if "mse" in row]
    assert losses[-1]["mse"] < losses[0]["mse"]
    assert ["spread" in row for row in losses] == [False] * 2 + [True] * 4
    scores = [row["weight"] for row in rows if "weight" in row]
    assert [row["best"] for row in rows if "best" in row] == [
        score == min(scores[: place + 1]) for place, score in enumerate(scores)
    ]
    assert Path(whole.best_weights).is_file()


@pytest.mark.own_process
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_plan_states_what_a_step_takes(tmp_path, micro_batches, checkpointing, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # live bytes, without what a heap keeps
    values = given(checkpointing=checkpointing)
    values["datasets"] = {"train": {"length": 480, "accum_iter": micro_batches}}
    config = SeriesConfig.from_values(values | {"width": 64})
    plan = plan_step(config, task_of(config), 1 << 40, "cpu")
    trainer = Trainer(config, tmp_path, task_of(config), micro_batches=micro_batches)
    batches = trainer.task.data
    for step in range(3):
        trainer._run_step(batches.at(step))
    weights = sum(
        one.numel() for network in trainer.task.networks.values() for one in network.parameters()
    )
    average = sum(one.numel() for one in trainer.ema_network.parameters())
    held = 4 * (3 * weights + average) + sum(one.nbytes for one in batches.at(3))
    taken = held + live_peak_bytes(lambda: trainer._run_step(batches.at(3)))
    assert plan.predicted_bytes == pytest.approx(taken, rel=0.05)


def test_the_budget_splits_batches_of_any_rank(tmp_path):
    values = given()
    values["datasets"] = {"train": {"length": 480}}
    config = SeriesConfig.from_values(values)
    whole = plan_step(config, task_of(config), 1 << 40, "cpu")
    small = plan_step(config, task_of(config), whole.upper_bytes // 2, "cpu")
    assert small.micro_batches > whole.micro_batches == 1
    with pytest.raises(BudgetError, match=r"no step fits in 1.00 MiB: 16 windows in"):
        plan_step(config, task_of(config), 1 << 20, "cpu")
    losses = []
    for plan in (whole, small):
        report = train_series(config, tmp_path / str(plan.micro_batches), budget=plan.upper_bytes)
        assert report.plan.micro_batches == plan.micro_batches
        losses.append([row["mse"] for row in rows_of(Path(report.folder).parent) if "mse" in row])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_step_that_fits_only_a_heap_that_returns_memory_gets_one(monkeypatch):
    monkeypatch.setattr("lowtide.core.heap._tuned", True)  # as on the command line
    values = given()
    values["datasets"] = {"train": {"length": 480, "accum_iter": 1}}
    config = SeriesConfig.from_values(values | {"width": 64})
    roomy = plan_step(config, task_of(config), 1 << 40, "cpu")
    tight = plan_step(config, task_of(config), roomy.upper_bytes - 1, "cpu")
    assert (roomy.heap, tight.heap) == ("cache", "trim")
    assert tight.upper_bytes < roomy.predicted_bytes
    assert tight.micro_batches == roomy.micro_batches == 1
    assert "returning freed memory" in str(tight)


def test_networks_that_never_learn_are_named(tmp_path):
    config = SeriesConfig.from_values(given())
    task = task_of(config)
    task.networks["scale"].unused = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"1 weights of the scale had no gradient .* unused"):
        Trainer(config, tmp_path, task).run()


def test_a_kind_of_training_is_a_few_lines_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job, task = (lambda: train_series), (lambda: task_of)
    kind = TrainKind("series", "Train.", lambda: "x", lambda: SeriesConfig, job, task)
    command = train_command(kind)
    (tmp_path / "c.yml").write_text(yaml.safe_dump(given()))
    words = ["c.yml", "--length", "12", "--optim.lr", "0.1", "--train.optim.lr", "3e-3"]
    with pytest.raises(SystemExit) as wrong:
        command.main(words)
    assert wrong.value.code == 2
    words.remove("--optim.lr")
    words.remove("0.1")
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        command.main([*words, "--device", "cpu", "--json", "-q"])
    assert not done.value.code
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    kept = json.loads((tmp_path / "experiments/series/config.json").read_text())
    assert (kept["datasets"]["train"]["length"], kept["train"]["optim"]["lr"]) == (12, 3e-3)


def test_numbers_of_philox_are_those_of_their_keys():
    """They are what batches of all trainings, and noise, are drawn from."""
    first = philox_generator(3, 1, 7, 2).integers(1 << 62, size=4)
    assert first.tolist() == philox_generator(3, 1, 7, 2).integers(1 << 62, size=4).tolist()
    others = [(4, 1, 7, 2), (3, 2, 7, 2), (3, 1, 8, 2), (3, 1, 7, 3), (2**64 - 1,) * 4]
    drawn = {tuple(philox_generator(*key).integers(1 << 62, size=4)) for key in others}
    assert len(drawn | {tuple(first)}) == 6
