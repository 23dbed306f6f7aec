"""Minute bars of a price, forecast 15, 60 and 240 minutes ahead, beside a random walk.

python examples/forecast_prices.py                          # a simulated price
python examples/forecast_prices.py BARS.csv                 # yours: date, open, high, low, close
python examples/forecast_prices.py BARS.csv --consecutive   # closed at night: count bars

The simulated price is a random walk whose volatility changes: nobody can know where it goes, only
how far. No forecaster has a lower squared error than a random walk on it, but by chance.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

import lowtide

HORIZONS = (15, 60, 240)
WALK = "naive (random walk)"
TICKS = 12  # of a simulated minute


def simulated_bars(weeks: int = 2, seed: int = 0) -> pd.DataFrame:
    """Return minute bars of a market that is closed at weekends: a random walk, made up by seed.

    The logarithm of its volatility returns to a daily pattern within some hours.
    """
    draw = np.random.default_rng(seed)
    minutes = pd.date_range("2026-01-05", periods=weeks * 7 * 1440, freq="min")
    minutes = minutes[minutes.day_of_week < 5]
    daily = 0.7 * np.cos(2 * np.pi * (minutes.hour.to_numpy() - 14) / 24)
    shocks, state = 0.1 * draw.normal(size=len(minutes)), 0.0
    volatility = np.empty(len(minutes))
    for minute, shock in enumerate(shocks):
        state = 0.99 * state + shock
        volatility[minute] = 5e-5 * np.exp(daily[minute] + state)
    steps = volatility[:, None] * draw.normal(size=(len(minutes), TICKS)) / np.sqrt(TICKS)
    prices = 1.1 * np.exp(steps.ravel().cumsum()).reshape(len(minutes), TICKS)
    return pd.DataFrame(
        {
            "date": minutes,
            "open": prices[:, 0],
            "high": prices.max(axis=1),
            "low": prices.min(axis=1),
            "close": prices[:, -1],
        }
    )


def main() -> None:
    """Score forecasts of the closing price and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bars", nargs="?", help="CSV with the columns date and close")
    parser.add_argument("--column", default="close", help="the price to forecast")
    parser.add_argument("--consecutive", action="store_true", help="count bars, not minutes")
    parser.add_argument("--stride", type=int, default=15, help="distance of the windows scored")
    given = parser.parse_args()
    if given.bars:
        bars = pd.read_csv(given.bars)
    else:
        bars = simulated_bars()
        print("The price is SIMULATED, a random walk: where it goes cannot be forecast.")
    if given.consecutive:
        print("Steps are bars: between the last of a day and the first of the next is one step.")
    report = lowtide.backtest(
        bars,
        horizons=HORIZONS,
        columns=[given.column],
        consecutive=given.consecutive,
        samples=100,
        stride=given.stride,
    )
    print(report)
    for one in report.horizons:
        model, walk = one.scores["ridge"], one.scores[WALK]
        print(
            f"{one.horizon} bars ahead, of the random walk's: squared error"
            f" {model['mse'] / walk['mse']:.3f}, CRPS {model['crps'] / walk['crps']:.3f}; the 90 %"
            f" band holds {model['coverage90']:.1%}, the random walk's {walk['coverage90']:.1%}"
        )
    print("At 1.000 a forecast is as good as the random walk, above it is worse.")


if __name__ == "__main__":
    main()
