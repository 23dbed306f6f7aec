"""Columns that are known ahead move every method's forecast, if their effect is clear."""

import numpy as np
import pandas as pd
import pytest

import lowtide
from lowtide.models.forecaster.known_effects import KnownEffects


def shop(days=400, ahead=14):
    """Sales with a week, 30 more on holidays, a price that matters and a column that does not."""
    draw = np.random.default_rng(0)
    day = np.arange(days + ahead)
    holiday = (draw.random(len(day)) < 0.1).astype(float)
    holiday[-ahead:] = np.arange(ahead) % 5 == 2
    price, weather = draw.choice([10.0, 12.0], len(day)), draw.normal(size=len(day))
    sales = 200 + 20 * (day % 7 == 5) + 30 * holiday - 4 * price + draw.normal(0, 2, len(day))
    frame = pd.DataFrame(
        {
            "date": pd.date_range("2024-01-01", periods=len(day)),
            "sales": sales,
            "holiday": holiday,
            "price": price,
            "weather": weather,
        }
    )
    frame.loc[days:, "sales"] = np.nan
    return frame, sales[days:]


@pytest.mark.parametrize("model", ["auto", "naive", "plain-ridge", "ridge"])
def test_holidays_and_prices_are_used_by_every_method(model):
    frame, truth = shop()
    made = lowtide.forecast(frame, horizon=14, model=model, target="sales")
    error = np.abs(made.frame["mean"].to_numpy() - truth)
    assert error.mean() < 5 and error.max() < 15
    assert (made.frame["0.1"] <= made.frame["0.9"]).all()
    assert "known ahead: holiday, price, weather" in made.report.notes
    assert any("not used: weather" in note for note in made.report.notes)


def test_steps_after_what_is_known_are_said():
    frame, _ = shop(ahead=5)
    made = lowtide.forecast(frame, horizon=14, target="sales")
    assert len(made.frame) == 14 and made.frame.notna().all(axis=None)
    assert any("known ahead for 5 of 14 steps" in note for note in made.report.notes)


def test_a_backtest_knows_of_them_too():
    frame, _ = shop()
    told = lowtide.backtest(frame, horizons=[7], target="sales", samples=20, stride=7)
    blind = lowtide.backtest(frame[["date", "sales"]].dropna(), horizons=[7], samples=20, stride=7)
    scores = [one.horizons[0].scores["auto"]["mae"] for one in (told, blind)]
    assert scores[0] < 0.6 * scores[1]


def chain(days=200, ahead=14):
    """A long table of shops that each have a price of their own, which moves them differently."""
    parts, truths = [], []
    for number in range(3):
        draw, day = np.random.default_rng(number), np.arange(days + ahead)
        price = draw.choice([1.0, 2.0, 4.0], len(day))
        sales = 200 + 20 * (day % 7 == 5) - 10 * (number + 1) * price + draw.normal(0, 2, len(day))
        frame = pd.DataFrame({"shop": f"s{number}", "date": day, "sales": sales, "price": price})
        frame["date"] = pd.date_range("2024-01-01", periods=len(day))
        frame.loc[days:, "sales"] = np.nan
        parts.append(frame)
        truths.append(sales[days:])
    return pd.concat(parts), np.concatenate(truths)


@pytest.mark.parametrize("model", ["auto", "naive", "ridge"])
def test_prices_of_each_series_of_a_long_table_are_used(model):
    frame, truth = chain()
    made = lowtide.forecast(frame, horizon=14, model=model)
    assert np.abs(made.frame["mean"].to_numpy() - truth).mean() < 5
    frame = frame[(frame["shop"] != "s1") | (frame["date"] < "2024-07-10")]
    made = lowtide.forecast(frame, horizon=14, model=model)
    late = (made.frame["shop"] != "s1").to_numpy()
    assert np.abs(made.frame["mean"].to_numpy() - truth)[late].mean() < 5
    assert any("known ahead for 0 to 14 of 14 steps" in note for note in made.report.notes)


def test_a_backtest_of_a_long_table_knows_of_them_too():
    frame, _ = chain()
    told = lowtide.backtest(frame, horizons=[7], samples=20, stride=7)
    blind = lowtide.backtest(
        frame.drop(columns="price").dropna(), horizons=[7], samples=20, stride=7
    )
    scores = [one.horizons[0].scores["auto"]["mae"] for one in (told, blind)]
    assert scores[0] < 0.5 * scores[1]


def test_chance_is_no_effect():
    found = []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        values, known = draw.normal(size=(60, 2)).cumsum(0), draw.normal(size=(60, 1, 1))
        found.append(KnownEffects.fit(values, known, 12).used.any())
    assert np.mean(found) < 0.1
