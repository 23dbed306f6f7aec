"""Backtests: every window, what each part adds, and scores that are what they are called."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import scoringrules
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")

import lowtide  # noqa: E402
from lowtide.cli.main import app  # noqa: E402
from lowtide.jobs.forecast.scores import ForecastScoreSums  # noqa: E402

LEVELS = np.arange(1, 10) / 10


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A day that repeats, with noise that has a memory, and a price that follows it."""
    draw, steps = np.random.default_rng(0), 900
    noise = np.zeros(steps)
    for step in range(1, steps):
        noise[step] = 0.9 * noise[step - 1] + draw.normal()
    load = 3 * np.sin(2 * np.pi * np.arange(steps) / 24) + noise
    frame = pd.DataFrame(
        {
            "date": pd.date_range("2026-01-01", periods=steps, freq="h"),
            "load": load,
            "price": 50 + 10 * load + draw.normal(size=steps),
        }
    )
    path = tmp_path_factory.mktemp("backtest") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def test_every_window_is_scored_beside_baselines(table, tmp_path):
    out, plot = tmp_path / "scores.json", tmp_path / "pit.png"
    words = [
        "-m",
        "ridge",
        "--horizons",
        "6,24",
        "--samples",
        "50",
        "--quiet",
        "-o",
        out,
        "--plot",
        plot,
    ]
    done = CliRunner().invoke(app, [str(word) for word in ("backtest", table, *words)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert [one["windows"] for one in report["horizons"]] == [180 - 6 + 1, 180 - 24 + 1]
    one = report["horizons"][1]
    scores, model = one["scores"], one["scores"]["ridge"]
    for name in ("naive (random walk)", "naive"):
        assert model["crps"] < 0.8 * scores[name]["crps"]
        assert model["mse"] < 0.8 * scores[name]["mse"]
    for name in ("dlinear", "plain-ridge", "theta", "ets", "mean"):
        assert model["crps"] < 1.1 * scores[name]["crps"]
    # Steps that move together make sums that independent steps are too sure of.
    for name in ("ridge, independent paths", "ridge, Gaussian errors"):
        assert model["crps_sum24"] < scores[name]["crps_sum24"]
        assert model["energy"] < scores[name]["energy"]
    assert one["paths"] == min(one["path_energy"], key=one["path_energy"].get) != "independent"
    assert 0.8 < model["coverage90"] < 0.98
    assert sum(one["pit"]["ridge"]) == pytest.approx(1)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "plain-ridge" in done.stdout


def test_a_backtest_has_the_same_numbers_again(table):
    settings = {"horizons": [3], "samples": 20, "seed": 1, "stride": 9, "columns": ["load"]}
    assert lowtide.backtest(table, **settings) == lowtide.backtest(table, **settings)


def test_the_paths_that_are_asked_for_are_the_models(table):
    asked = lowtide.backtest(
        table, horizons=[24], samples=20, paths="independent", stride=8, model="ridge"
    )
    one = asked.horizons[0]
    assert (one.paths, one.path_energy) == ("independent", {})
    assert "ridge, independent paths" not in one.scores
    assert one.scores["ridge, bootstrap paths"]["crps_sum24"] < one.scores["ridge"]["crps_sum24"]


def test_scores_are_those_of_scoringrules_at_any_level():
    draw, level = np.random.default_rng(0), 1e7
    deviation = np.array([1.0, 3.0])
    truth = level + draw.normal(size=(5, 48, 2)) * deviation
    samples = level + draw.normal(size=(5, 31, 48, 2)) * deviation
    truth[2, 5, 1] = np.nan
    scores = ForecastScoreSums(deviation)
    for part in (slice(0, 2), slice(2, 5)):
        scores.add_samples(truth[part], samples[part])
        scores.add_joint(truth[part], samples[part])
    found, pit = scores.means(), scores.pit()
    truth, samples = truth / deviation, np.moveaxis(samples / deviation, 1, -1)
    fair = scoringrules.crps_ensemble(truth, samples, estimator="fair")
    low, high = np.quantile(samples, (0.05, 0.95), axis=-1)
    interval = scoringrules.interval_score(truth, low, high, 0.1)
    inside = ((truth >= low) & (truth <= high))[np.isfinite(truth)]
    quantiles = np.moveaxis(np.quantile(samples, LEVELS, axis=-1), 0, -1)
    loss = scoringrules.quantile_score(truth[..., None], quantiles, LEVELS)
    sums = scoringrules.crps_ensemble(
        truth.reshape(5, 2, 24, 2).sum(2), samples.reshape(5, 2, 24, 2, 31).sum(2), estimator="fair"
    )
    assert found["crps"] == pytest.approx(np.nanmean(fair), rel=1e-5)
    assert found["winkler90"] == pytest.approx(np.nanmean(interval), rel=1e-5)
    assert found["coverage90"] == pytest.approx(inside.mean())
    expected = 2 * np.nansum(loss) / len(LEVELS) / np.nansum(np.abs(truth))
    assert found["wql"] == pytest.approx(expected, rel=1e-5)
    assert found["crps_sum24"] == pytest.approx(np.nanmean(sums), rel=1e-5)
    # Targets from the distribution they are judged by are in each tenth of it alike.
    assert max(np.abs(np.array(pit) - 0.1)) < 0.06


def test_too_narrow_bands_are_seen():
    draw = np.random.default_rng(0)
    truth, samples = draw.normal(size=(50, 4, 1)), 0.3 * draw.normal(size=(50, 40, 4, 1))
    scores = ForecastScoreSums(np.ones(1))
    scores.add_samples(truth, samples)
    assert scores.means()["coverage90"] < 0.5
    assert scores.pit()[0] + scores.pit()[-1] > 0.5


def test_the_ett_split_is_of_whole_days_wherever_the_first_begins(tmp_path):
    day = pd.date_range("2026-01-01 13:00", periods=700 * 4, freq="6h")
    frame = pd.DataFrame({"date": day, "a": np.random.default_rng(0).normal(size=len(day))})
    report = lowtide.backtest(frame, horizons=[4], split="ett", samples=10, stride=40)
    assert (report.train_steps, report.test_steps, report.history) == (1440, 480, 2400)
    monthly = frame.assign(date=pd.date_range("1800-01-01", periods=len(day), freq="MS"))
    with pytest.raises(lowtide.UsageError, match="split ett is of days"):
        lowtide.backtest(monthly, horizons=[4], split="ett")


def test_without_scoringrules_nothing_is_fitted(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "scoringrules", None)
    with pytest.raises(lowtide.UsageError, match="scores need scoringrules") as refused:
        lowtide.backtest(table.with_name("none.csv"), horizons=[4])
    assert refused.value.hint.endswith("pip install '.[forecast]'")


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit and its fields are Linux's")
def test_a_low_limit_is_refused_with_one_that_would_do(table, tmp_path):
    """OpenBLAS would ask for memory for ever."""
    command = f"ulimit -d 900000; exec {sys.executable} -m lowtide backtest {table} --horizon 4"
    environment = {**os.environ, "LOWTIDE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 3, run.stderr
    assert re.search(r"raise that limit to \d+ MiB", run.stderr)
