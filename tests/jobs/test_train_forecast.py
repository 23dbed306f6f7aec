"""Training of forecasters, and what their folders forecast, as users call them."""

import json
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

import lowtide  # noqa: E402
from lowtide.cli.main import app  # noqa: E402
from lowtide.core.errors import Cancelled, NotFiniteError  # noqa: E402
from lowtide.jobs.forecast.train import train_forecast  # noqa: E402
from lowtide.training.tasks.forecast_config import ForecastConfig  # noqa: E402

STEPS = 400
NETWORK = {
    "image_size": "16,16",
    "look_back": 48,
    "width": 8,
    "latent_channels": 2,
    "sampling_steps": 3,
}


def frame_of(steps, names=("load", "price"), frequency="h"):
    stamps = pd.date_range("2026-01-01", periods=steps, freq=frequency)
    draw = np.random.default_rng(0)
    day = 3 * np.sin(2 * np.pi * np.arange(steps) / 24)
    noise = draw.normal(size=(steps, len(names))).cumsum(axis=0) * 0.3
    values = {name: 50 + 4 * day + noise[:, number] for number, name in enumerate(names)}
    return pd.DataFrame({"date": stamps, **values})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a table, and a run of four steps that the command line trained."""
    folder = tmp_path_factory.mktemp("forecaster")
    frame_of(STEPS).to_csv(folder / "load.csv", index=False)
    words = ["train", "forecast", folder / "load.csv", "--horizons", "6,12", "-o", folder]
    for name, value in NETWORK.items():
        words += [f"--network.{name.replace('_', '-')}", value]
    more = [
        "--device",
        "cpu",
        "--total-iter",
        4,
        "--batch-size-per-gpu",
        4,
        "--val-freq",
        2,
        "--print-freq",
        1,
    ]
    done = run(*words, *more)
    assert done.exit_code == 0, done.output
    assert "load-forecast: 4 steps" in done.stdout
    return folder


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def config_of(home, **train):
    """The configuration of the run in ``home``, with other entries of its section ``train``."""
    values = json.loads((home / "load-forecast" / "config.json").read_text())
    values["train"] |= train
    return ForecastConfig.from_values(values)


def test_a_run_is_a_model_that_forecasts(home, tmp_path):
    model = home / "load-forecast"
    rows = [json.loads(line) for line in (model / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "denoising" in row] == [1, 2, 3, 4]
    scores = [row for row in rows if "error_share" in row]
    assert [row["step"] for row in scores] == [2, 4]
    # Of an untrained network, in units of paths whose variance is about 1.
    assert 0.5 < rows[0]["denoising"] < 2
    best = min(scores, key=lambda row: row["error_share"])
    weights = load_file(model / "models" / "load-forecast_best.safetensors")
    assert float(weights["strength"]) == best["strength"]
    made = {}
    for paths in ("auto", "bootstrap"):
        out = tmp_path / f"{paths}.csv"
        words = ["--horizon", 6, "--samples", 40, "--paths", paths, "--json"]
        done = run("forecast", home / "load.csv", "-m", model, "-o", out, *words)
        assert done.exit_code == 0, done.output
        made[paths] = json.loads(done.stdout), pd.read_csv(out)
    report, frame = made["auto"]
    assert report["paths"] == "diffusion" and made["bootstrap"][0]["paths"] == "bootstrap"
    assert report["until"] == "2026-01-12T15:00:00"  # of 400 hours, the first 280
    assert len(frame) == 2 * 6
    # The same mean and scale: bands of diffusion are about as wide.
    width = {name: (one["0.9"] - one["0.1"]).mean() for name, (_, one) in made.items()}
    assert 0.6 < width["auto"] / width["bootstrap"] < 1.6
    pd.testing.assert_series_equal(frame["mean"], made["bootstrap"][1]["mean"])
    few, many = (
        lowtide.forecast(home / "load.csv", model=model, horizon=12, samples=count).samples
        for count in (3, 40)
    )
    np.testing.assert_array_equal(few, many[:3])
    np.testing.assert_allclose(
        many[:, :6].mean(axis=(0, 1)), frame.groupby("unique_id")["mean"].mean(), atol=3
    )


def test_backends_that_cannot_run_are_notes_of_the_reports(home, tmp_path):
    values = config_of(home).model_dump(mode="json")
    values["network"]["attention_backend"] = "flash"
    values["train"] |= {"total_iter": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = train_forecast(ForecastConfig.from_values(values), tmp_path, device="cpu")
        made = lowtide.forecast(home / "load.csv", model=trained.folder, horizon=6, samples=2)
    for notes in (trained.warnings, made.report.notes):
        assert any("attention backend flash: " in text for text in notes)
        assert len(notes) == len(set(notes))


def test_a_backtest_scores_what_it_was_not_trained_on(home):
    done = run(
        "backtest", home / "load.csv", "-m", home / "load-forecast", "--horizon", 12, "--json"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    (scores,) = report["horizons"]
    assert (scores["windows"], scores["joint_windows"], scores["joint_samples"]) == (69, 3, 50)
    diffusion = scores["scores"]["ridge, diffusion paths"]
    assert {"crps", "coverage90", "energy", "crps_sum24"} <= set(diffusion)
    assert diffusion["energy"] < 1.5 * scores["scores"]["ridge"]["energy"]
    assert {"ridge, Gaussian errors", "dlinear", "naive (random walk)"} <= set(scores["scores"])
    seen = run("backtest", home / "load.csv", "-m", home / "whole", "--horizon", 12)
    assert seen.exit_code == 2 and "is no folder" in seen.stderr


def test_a_stopped_run_goes_on_as_if_it_never_was(home, tmp_path):
    stop = threading.Event()

    def stop_after_two(event):
        if event.step == 2:
            stop.set()

    with pytest.raises(Cancelled):
        train_forecast(config_of(home), tmp_path, device="cpu", on_step=stop_after_two, cancel=stop)
    again = train_forecast(config_of(home), tmp_path, device="cpu")
    assert (again.resumed_step, again.steps) == (2, 4)
    for one in ("load-forecast.safetensors", "models/forecaster.npz", "models/forecast.json"):
        made = [(folder / "load-forecast" / one).read_bytes() for folder in (home, tmp_path)]
        assert made[0] == made[1], one
    assert Path(again.best_weights).is_file()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run(home, tmp_path):
    with pytest.raises(NotFiniteError, match=r"(loss denoising|gradient of the denoiser)"):
        train_forecast(config_of(home, optim={"lr": 1e37}), tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("words", "table", "says"),
    [
        (["--horizon", 13], {}, "trained for 12 steps ahead, not 13"),
        (["--horizon", 6], {"names": ("load", "wind")}, "there is no series 'price'"),
        (["--horizon", 6, "--columns", "load"], {}, "trained on the series load, price"),
        (["--horizon", 6], {"frequency": "30min"}, "trained on h"),
        (["--horizon", 6], {"steps": 60}, "60 steps are less than"),
        (["--horizon", 6, "--paths", "flow"], {}, "'flow' is not one of"),
        (["--horizon", 6, "-m", "ridge", "--paths", "diffusion"], {}, "lowtide train forecast"),
        (["--horizon", 6, "-m", "."], {}, "has no trained forecaster"),
    ],
)
def test_what_a_folder_cannot_forecast(home, tmp_path, words, table, says):
    data = tmp_path / "other.csv"
    frame_of(**{"steps": STEPS, **table}).to_csv(data, index=False)
    done = run("forecast", data, "-m", home / "load-forecast", *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr


def test_what_was_trained_on_is_not_scored(home, tmp_path):
    longer = tmp_path / "earlier.csv"
    frame_of(STEPS).iloc[:330].to_csv(longer, index=False)  # the last part begins before the end
    done = run("backtest", longer, "-m", home / "load-forecast", "--horizon", 6)
    assert done.exit_code == 2
    assert "trained on data until 2026-01-12T15:00:00" in done.stderr


def test_configurations_that_make_no_sense(home):
    done = run("train", "forecast", home / "load.csv", "--horizons", "0", "--image-size", "20")
    assert done.exit_code == 2
    assert "--horizons" in done.stderr and "--image-size" in done.stderr
    example = yaml.safe_load(run("train", "forecast", "--example").stdout)
    assert ForecastConfig.from_values(example).horizons == [96]
    both = run("train", "forecast", home / "load.csv", home / "load.csv", "--horizons", "6")
    assert both.exit_code == 2 and "2 files are given" in both.stderr
    long = run("train", "forecast", home / "load.csv", "--horizons", "12", "-o", home / "new")
    assert long.exit_code == 2
    assert "network.look_back" in long.stderr
