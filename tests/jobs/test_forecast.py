"""Forecasts and backtests of tables, as users call them."""

import numpy as np
import pytest
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")

import lowtide  # noqa: E402
from lowtide.cli.main import app  # noqa: E402


@pytest.fixture
def table(tmp_path):
    stamps = pd.date_range("2026-01-01", periods=600, freq="h")
    draw = np.random.default_rng(0)
    day = 3 * np.sin(2 * np.pi * np.arange(600) / 24)
    frame = pd.DataFrame(
        {"date": stamps, "load": day + draw.normal(size=600), "price": 50 + 10 * day}
    )
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    return path


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_quantiles_samples_and_a_plot_are_written(table, tmp_path):
    out, paths, plot = (tmp_path / name for name in ("out.csv", "paths.parquet", "plot.png"))
    words = ["--horizon", 24, "--levels", ".05,.5,.95", "--plot", plot, "--samples-output", paths]
    done = run("forecast", table, "-o", out, *words)
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(out, parse_dates=["ds"])
    assert list(frame) == ["unique_id", "ds", "mean", "0.05", "0.5", "0.95"]
    assert frame["ds"].min() == pd.Timestamp("2026-01-26")
    assert len(frame) == 2 * 24
    assert (np.diff(frame[["0.05", "0.5", "0.95"]].to_numpy(), axis=1) >= 0).all()
    # In the units of the data: a price that repeats itself is known well.
    price = frame[frame["unique_id"] == "price"]["mean"].to_numpy()
    np.testing.assert_allclose(price, 50 + 30 * np.sin(np.pi / 12 * np.arange(24)), atol=3)
    assert pd.read_parquet(paths).shape == (48, 202)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "24 ahead" in done.output


def test_without_a_file_the_table_is_printed(table):
    done = run("forecast", table, "--horizon", 3, "--columns", "load")
    assert done.stdout.splitlines()[0] == "unique_id,ds,mean,0.1,0.5,0.9"
    assert len(done.stdout.splitlines()) == 4


def test_frames_keep_their_names_and_the_seed_the_samples(table):
    wide = pd.read_csv(table)
    long = pd.DataFrame({"item_id": "a", "timestamp": wide["date"], "target": wide["load"]})
    made = [
        lowtide.forecast(long, horizons=[6, 12], quantile_levels=[0.5, 0.50000001], seed=seed)
        for seed in (0, 0, 1)
    ]
    assert list(made[0].frame) == ["item_id", "timestamp", "mean", "0.5", "0.50000001"]
    assert made[0].samples.shape == (200, 12, 1)
    np.testing.assert_array_equal(made[0].samples, made[1].samples)
    assert (made[0].samples != made[2].samples).any()


def test_paths_are_chosen_or_named(table):
    made = {name: lowtide.forecast(table, horizon=6, paths=name) for name in ("auto", "copula")}
    energy = made["auto"].report.path_energy
    assert made["auto"].report.paths == min(energy, key=energy.get)
    assert "copula" in energy
    assert made["copula"].report.paths == "copula"
    independent = lowtide.forecast(table, horizon=6, paths="independent")
    np.testing.assert_array_equal(made["copula"].frame["mean"], independent.frame["mean"])
    assert (made["copula"].samples != independent.samples).any()


def test_each_series_is_forecast_from_its_own_end():
    draw = np.random.default_rng(0)
    parts = []
    for number in range(3):
        stamps = pd.date_range("2020-01-01", periods=150) + pd.Timedelta(40 * number, "D")
        week = 10 * np.sin(2 * np.pi * np.arange(150) / 7)
        parts.append(pd.DataFrame({"unique_id": number, "ds": stamps, "y": 100 + week}))
        parts[-1]["y"] += draw.normal(size=150)
    made = lowtide.forecast(pd.concat(parts), horizon=7, samples=20)
    assert made.samples.shape == (20, 7, 3)
    for number, part in enumerate(parts):
        # Names that are numbers in a frame stay numbers, for the user's joins.
        one = made.frame[made.frame["unique_id"] == number]
        after = pd.date_range(part["ds"].iloc[-1], periods=8)[1:]
        assert list(one["ds"]) == list(after)
        wave = 100 + 10 * np.sin(2 * np.pi * np.arange(150, 157) / 7)
        np.testing.assert_allclose(one["mean"], wave, atol=4)


def test_rows_of_the_future_are_what_is_forecast(tmp_path):
    stamps = pd.date_range("2021-01-01", periods=157)
    load = np.r_[np.sin(2 * np.pi * np.arange(150) / 7), [np.nan] * 7]
    frame = pd.DataFrame({"date": stamps, "load": load, "holiday": stamps.day_of_week > 4})
    path = tmp_path / "plan.csv"
    frame.to_csv(path, index=False)
    done = run("forecast", path, "--horizon", 7, "-o", tmp_path / "out.csv", "--samples", 20)
    assert done.exit_code == 0 and "known ahead: holiday" in done.output
    out = pd.read_csv(tmp_path / "out.csv", parse_dates=["ds"])
    assert list(out["ds"]) == list(stamps[150:]) and set(out["unique_id"]) == {"load"}


def test_options_of_reading_are_the_same_for_forecasts_and_backtests(tmp_path):
    days, path = pd.date_range("2025-01-01", periods=200, tz="Europe/Berlin"), tmp_path / "t.csv"
    midnights = days.tz_convert("UTC").strftime("%d/%m/%Y %H:%M:%SZ")
    values = [f"1.{100 + k % 7 * 10},{k % 10}" for k in range(200)]
    rows = [f"{midnights[k]};0{k // 100};{values[k]}" for k in range(200)]
    path.write_text("when;shop;sold\n" + "\n".join(rows))
    words = ["--time-column", "when", "--id-column", "shop", "--target", "sold", "--day-first"]
    words += ["--decimal", ",", "--timezone", "Europe/Berlin", "--season", "7", "--horizon", "2"]
    words += ["--frequency", "D", "--samples", "20"]
    done = run("forecast", path, *words, "-o", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    out = pd.read_csv(tmp_path / "out.csv", dtype=str)
    assert list(out)[:2] == ["shop", "when"] and set(out["shop"]) == {"00", "01"}
    assert out["when"][out["shop"] == "01"].iloc[0] == "2025-07-20 00:00:00+02:00"
    done = run("backtest", path, *words, "--json")
    assert done.exit_code == 0, done.output
    refused = run("forecast", path, "--horizon", 2, "--decimal", ";")
    assert refused.exit_code == 2 and "a decimal ';' is none" in refused.output


def test_a_table_is_read_from_standard_input(table):
    words = ["forecast", "-", "--horizon", "2", "--columns", "load", "--samples", "20"]
    done = CliRunner().invoke(app, words, input=table.read_bytes())
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].startswith("load,2026-01-26 00:00:00")


def test_counted_rows_go_on_with_numbers(tmp_path):
    path = tmp_path / "bars.csv"
    stamps = pd.date_range("2021-01-01", periods=900)[np.random.default_rng(0).random(900) < 0.2]
    path.write_text("date,v\n" + "\n".join(f"{one},{k % 5}" for k, one in enumerate(stamps)))
    refused = run("forecast", path, "--horizon", 2)
    assert refused.exit_code == 2 and "--consecutive" in refused.output
    done = run("forecast", path, "--horizon", 2, "--consecutive", "--season", 5)
    assert done.exit_code == 0, done.output
    assert f"v,{len(stamps) + 1}," in done.stdout
    plot = run("forecast", path, "--horizon", 2, "--consecutive", "--plot", tmp_path / "p.png")
    assert plot.exit_code == 0, plot.output


def test_an_existing_file_is_kept(table, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("precious")
    refused = run("forecast", table, "-o", out, "--horizon", 3)
    assert refused.exit_code == 2
    assert out.read_text() == "precious"
    assert run("forecast", table, "-o", out, "--horizon", 3, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no horizon"),
        (["--horizon", "0"], "--horizon 0 has to be at least 1"),
        (["--horizons", "24.7"], "--horizons 24.7 is not a whole number"),
        (["--horizon", "3", "--levels", "1.5"], "--levels 1.5 has to be below 1"),
        (["--horizon", "3", "--levels", "x"], "--levels x is not a number"),
        (["--horizon", "3", "--samples", "1"], "--samples 1 has to be at least 2"),
        (["--horizon", "3", "--paths", "garden"], "'garden' is not one of"),
        (["--horizon", "3", "--seed", "-1"], "--seed -1 has to be at least 0"),
        (["--horizon", "3", "--seed", str(2**63)], "has to be at most"),
        (["--horizon", "3", "--seed", str(2**70)], "has to be at most"),
        (["--horizon", "3", "--samples", str(2**31 - 1)], "of memory"),
        (["--horizon", "3", "--samples", str(2**70)], "has to be at most"),
        (["--horizon", "3", "--frequency", "fortnight"], "fortnight"),
        (["--model", "ridge", "--horizon", "599"], "too few"),
    ],
)
def test_wrong_words_are_refused(table, words, message):
    refused = run("forecast", table, *words)
    assert refused.exit_code == 2
    assert message in refused.output


def test_a_target_is_forecast_by_the_model_of_all(table):
    of_all = lowtide.forecast(table, horizon=6)
    one = lowtide.forecast(table, horizon=6, target="price")
    same = of_all.frame[of_all.frame["unique_id"] == "price"].reset_index(drop=True)
    pd.testing.assert_frame_equal(one.frame, same)
    assert one.samples.shape == (200, 6, 1)
    scored = lowtide.backtest(table, target="load", horizons=[6], samples=20, stride=9)
    assert scored.series == 1
    # The price repeats itself and is known better than the load, which alone is scored.
    assert scored.horizons[0].scores["ridge"]["mse"] > 0.1
    refused = run("forecast", table, "--horizon", 6, "--target", "water")
    assert refused.exit_code == 2 and "no series 'water'" in refused.output


def test_missing_values_neither_spoil_the_mean_nor_narrow_the_bands(table):
    whole = pd.read_csv(table)
    draw = np.random.default_rng(1)
    holed = whole.mask(draw.random(whole.shape) < 0.1).assign(date=whole["date"], late=np.nan)
    holed.loc[597:, "late"] = [4.0, 5.0, 7.0]
    made = {
        name: lowtide.forecast(frame, horizon=24, columns=columns, paths="bootstrap")
        for name, frame, columns in (
            ("whole", whole, ["load", "price"]),
            ("holed", holed, ["load", "price", "late"]),
        )
    }
    mean, width = {}, {}
    for name, one in made.items():
        load = one.frame[one.frame["unique_id"] == "load"]
        mean[name], width[name] = load["mean"].to_numpy(), (load["0.9"] - load["0.1"]).mean()
    # The day is still known: a forecast of the last value would be 3 off on its crest.
    assert np.abs(mean["holed"] - mean["whole"]).mean() < 0.6
    assert 0.8 < width["holed"] / width["whole"] < 1.25
    late = made["holed"].frame.query("unique_id == 'late'")
    assert (late["0.9"] > late["0.1"]).all()
    assert "bands are guesses: late" in str(made["holed"].report)


def test_names_of_files_are_checked_before_anything_is_computed(table, tmp_path, monkeypatch):
    out, plot = tmp_path / "out.csv", tmp_path / "plot.unknown"
    done = run("forecast", table, "--horizon", 24, "-o", out, "--plot", plot)
    assert done.exit_code == 2
    assert "not written as .unknown" in done.output
    done = run("backtest", table, "--horizon", 24, "-o", out, "--plot", plot)
    assert done.exit_code == 2
    assert "not written as .unknown" in done.output
    # As where neither is installed.
    monkeypatch.setattr("lowtide.jobs.forecast.frames.find_spec", lambda name: None)
    done = run("forecast", table, "--horizon", 24, "-o", tmp_path / "out.parquet")
    assert done.exit_code == 2
    assert "Parquet files need pyarrow" in done.output
    assert list(tmp_path.iterdir()) == [table]


def test_the_table_itself_is_never_replaced(table):
    before = table.read_bytes()
    for words in (
        ["forecast", table, "--horizon", 24, "-o", table, "--force"],
        ["backtest", table, "--horizon", 24, "-o", table, "--force"],
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert "this output is the input" in done.output
    assert table.read_bytes() == before
