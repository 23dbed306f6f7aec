"""Which method a table gets, and whether its bands hold, as users see it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")
pytest.importorskip("statsmodels")

import lowtide  # noqa: E402
from lowtide.cli.main import app  # noqa: E402

LEVELS = [0.025, 0.1, 0.5, 0.9, 0.975]
NAMES = ("naive", "ets", "theta", "mean", "plain-ridge", "dlinear", "ridge")


def monthly(values, start="2010-01-01", freq="MS"):
    values = np.asarray(values, float)
    names = ["y"] if values.ndim == 1 else [f"s{place}" for place in range(values.shape[1])]
    frame = pd.DataFrame(values.reshape(len(values), -1), columns=names)
    frame.insert(0, "date", pd.date_range(start, periods=len(values), freq=freq))
    return frame


def season_and_trend(steps, seed=0):
    draw, time = np.random.default_rng(seed), np.arange(steps)
    return 100 + time + 10 * np.sin(2 * np.pi * time / 12) + draw.normal(0, 1, steps)


def cycles(steps, seed=0):
    """A cycle of 11 steps that no calendar knows, with a phase that wanders."""
    draw = np.random.default_rng(seed)
    values = np.zeros(steps)
    for step in range(2, steps):
        before = 2 * 0.98 * np.cos(2 * np.pi / 11) * values[step - 1] - 0.96 * values[step - 2]
        values[step] = before + draw.normal()
    return values


@pytest.mark.parametrize(
    ("rows", "horizon", "freq"),
    [
        (3, 1, "MS"),
        (4, 6, "YS"),
        (9, 12, "MS"),
        (14, 6, "YS"),
        (15, 1, "MS"),
        (16, 8, "QS"),
        (26, 8, "QS"),
        (51, 18, "MS"),
        (72, 24, "MS"),
        (30, 60, "D"),
    ],
)
def test_no_table_is_too_short_and_its_bands_are_called_guesses(rows, horizon, freq):
    made = lowtide.forecast(
        monthly(season_and_trend(rows), freq=freq), horizon=horizon, quantile_levels=LEVELS
    )
    bands = made.frame[["0.025", "0.1", "mean", "0.9", "0.975"]].to_numpy()
    assert np.isfinite(bands).all()
    assert (np.diff(bands, axis=1) > 0).all()
    assert "bands are guesses" in str(made.report)


def test_the_mean_is_inside_its_bands_and_they_hold_on_short_series():
    """Random walks with a trend of 30 to 60 quarters: the truth is known to be hard to know."""
    inside, outside = [], 0
    for seed in range(25):
        draw = np.random.default_rng(seed)
        steps = int(draw.integers(30, 60))
        values = 500 + np.cumsum(draw.normal(draw.normal(), 3, steps + 8))
        frame = monthly(values[:steps], freq="QS")
        made = lowtide.forecast(frame, horizon=8, quantile_levels=LEVELS).frame
        low, high = made["0.025"].to_numpy(), made["0.975"].to_numpy()
        inside.append(((values[steps:] >= low) & (values[steps:] <= high)).mean())
        outside += int(((made["mean"] < made["0.1"]) | (made["mean"] > made["0.9"])).sum())
    assert outside == 0
    assert np.mean(inside) > 0.85


def test_season_and_trend_go_on_in_a_short_table():
    values = season_and_trend(60 + 12)
    made = lowtide.forecast(monthly(values[:60]), horizon=12)
    assert np.abs(made.frame["mean"] - values[60:]).mean() < 2.5
    naive = np.abs(values[48:60] - values[60:]).mean()
    assert made.report.against_repeating < 1 < naive / 2.5
    assert "below that of repeating the last season" in str(made.report)


def test_a_long_cycle_gets_a_ridge_and_a_random_walk_does_not():
    found = lowtide.forecast(monthly(cycles(400), start="1700-01-01", freq="YS"), horizon=8)
    assert set(found.report.methods) <= {"plain-ridge", "ridge"}
    assert found.report.against_repeating < 0.8
    walk = np.cumsum(np.random.default_rng(0).normal(size=400))
    found = lowtide.forecast(monthly(walk, start="1700-01-01", freq="YS"), horizon=8)
    assert set(found.report.methods) <= {"mean", "naive", "ets", "theta"}


def test_how_many_of_later_errors_bands_held_is_said():
    noise = np.random.default_rng(0).normal(100, 5, 300)
    steady = lowtide.forecast(monthly(noise, start="1990-01-01"), horizon=6).report
    assert 0.9 < steady.held95 <= 1
    assert f"held {steady.held95:.0%} of the later" in str(steady)
    wilder = np.where(np.arange(300) < 230, noise, 100 + 6 * (noise - 100))
    assert lowtide.forecast(monthly(wilder, start="1990-01-01"), horizon=6).report.held95 < 0.8
    short = lowtide.forecast(monthly(noise[:20], start="1990-01-01"), horizon=6).report
    assert short.held95 is None


def test_each_series_has_its_own_method():
    draw = np.random.default_rng(1)
    values = np.stack([cycles(300), 50 + np.cumsum(draw.normal(size=300))], axis=1)
    report = lowtide.forecast(monthly(values, freq="YS", start="1750-01-01"), horizon=6).report
    assert report.by_series["s0"].method in ("plain-ridge", "ridge")
    assert report.by_series["s1"].method in ("mean", "naive", "ets", "theta")
    assert report.by_series["s0"].scores["plain-ridge"] < report.by_series["s0"].scores["naive"]
    assert sum(report.methods.values()) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_method_can_be_named(name):
    values = season_and_trend(140 + 12)
    made = lowtide.forecast(monthly(values[:140]), horizon=12, model=name)
    assert made.report.methods == {name: 1}
    assert np.abs(made.frame["mean"] - values[140:]).mean() < 6
    assert (made.frame["0.1"] < made.frame["mean"]).all()
    assert made.samples.shape == (200, 12, 1)


def test_a_method_without_rows_enough_says_so_and_what_would_do(tmp_path):
    path = tmp_path / "short.csv"
    monthly(season_and_trend(12)).to_csv(path, index=False)
    words = ["forecast", str(path), "--horizon", "6", "--model"]
    refused = CliRunner().invoke(app, [*words, "ridge"])
    assert refused.exit_code == 2
    assert "12 rows are too few" in refused.output and "--model auto" in refused.output
    assert CliRunner().invoke(app, [*words, "auto"]).exit_code == 0


def test_a_long_season_leaves_ets_out_and_says_so():
    time = np.arange(200)
    values = 20 + 5 * np.sin(2 * np.pi * time / 52) + np.random.default_rng(0).normal(size=200)
    report = lowtide.forecast(monthly(values, freq="W"), horizon=4).report
    assert "ets is left out: a season of 52 steps is longer than 24" in report.notes
    assert "ets" not in report.by_series["y"].scores


def test_steps_of_simulated_paths_move_together_and_so_do_series():
    draw = np.random.default_rng(0)
    shocks = draw.normal(size=(60, 1)) + 0.3 * draw.normal(size=(60, 2))
    walks = 100 + np.cumsum(shocks, axis=0)
    table = monthly(walks, freq="YS", start="1950-01-01")
    made = lowtide.forecast(table, horizon=12, model="naive", samples=500)
    paths = made.samples - made.samples.mean(axis=0)
    assert made.report.windows < 20
    assert np.corrcoef(paths[:, 5, 0], paths[:, 11, 0])[0, 1] > 0.5
    assert np.corrcoef(paths[:, 5, 0], paths[:, 5, 1])[0, 1] > 0.3
    alone = lowtide.forecast(table, horizon=12, model="naive", paths="independent")
    paths = alone.samples - alone.samples.mean(axis=0)
    assert abs(np.corrcoef(paths[:, 5, 0], paths[:, 11, 0])[0, 1]) < 0.3


def test_counts_end_at_zero_unless_asked_otherwise(tmp_path):
    draw, path, out = np.random.default_rng(0), tmp_path / "counts.csv", tmp_path / "out.csv"
    values = np.stack([draw.poisson(1.5, 200), draw.normal(0, 1, 200)], axis=1)
    frame = monthly(values, freq="D")
    made = lowtide.forecast(frame, horizon=10, quantile_levels=LEVELS)
    counts = made.frame[made.frame["unique_id"] == "s0"]
    assert counts[["mean", *map(str, LEVELS)]].to_numpy().min() >= 0
    assert made.samples[..., 0].min() == 0 and made.samples[..., 1].min() < 0
    assert "bands end at 0, below which the data never were: s0" in made.report.notes
    free = lowtide.forecast(frame, horizon=10, non_negative=False)
    assert free.samples[..., 0].min() < 0 and not free.report.notes
    frame.to_csv(path, index=False)
    words = ["forecast", path, "--horizon", 10, "--non-negative", "-o", out]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert pd.read_csv(out)[["mean", "0.1"]].to_numpy().min() >= 0


def test_bands_are_named_by_what_they_hold(tmp_path):
    path = tmp_path / "table.csv"
    monthly(season_and_trend(60)).to_csv(path, index=False)
    words = ["forecast", path, "--horizon", 3, "--interval", "95,80"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    head, *rows = done.stdout.splitlines()
    assert head == "unique_id,ds,mean,0.5,lo-95,lo-80,hi-80,hi-95"
    assert all(np.diff([float(cell) for cell in row.split(",")[4:]]).min() > 0 for row in rows[:3])
    refused = CliRunner().invoke(app, [str(word) for word in (*words[:-1], "120")])
    assert refused.exit_code == 2 and "--interval 120 has to be below 100" in refused.output


def test_a_series_that_begins_late_is_forecast_from_its_own_rows():
    values = np.stack([season_and_trend(80), season_and_trend(80, 1) * 5], axis=1)
    values[:50, 1] = np.nan
    made = lowtide.forecast(monthly(values), horizon=6, model="mean")
    late = made.frame[made.frame["unique_id"] == "s1"]["mean"].to_numpy()
    alone = monthly(values[50:, 1], start="2014-03-01")
    alone = lowtide.forecast(alone, horizon=6, model="mean")
    np.testing.assert_allclose(late, alone.frame["mean"], rtol=1e-9)


def test_constants_and_large_levels_are_forecast():
    draw = np.random.default_rng(0)
    values = np.stack([np.full(40, 7.0), 1e15 + draw.normal(0, 10, 40)], axis=1)
    made = lowtide.forecast(monthly(values), horizon=4, quantile_levels=LEVELS)
    constant = made.frame[made.frame["unique_id"] == "s0"]
    np.testing.assert_allclose(constant[["mean", *map(str, LEVELS)]], 7.0)
    assert np.abs(made.frame[made.frame["unique_id"] == "s1"]["mean"] - 1e15).max() < 100


def test_a_backtest_scores_every_method_and_says_what_was_taken(tmp_path):
    path = tmp_path / "table.csv"
    monthly(season_and_trend(160)).to_csv(path, index=False)
    words = ["backtest", str(path), "--horizon", "6", "--samples", "50", "-q", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    one = report["horizons"][0]
    assert {"auto", *NAMES, "naive (random walk)"} <= set(one["scores"])
    assert one["scores"]["auto"]["crps"] < one["scores"]["naive (random walk)"]["crps"]
    assert one["chosen"]["y"] in NAMES
