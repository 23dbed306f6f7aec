"""Backtest of the forecaster on ETTh1: four horizons, every window, beside baselines.

    python benchmarks/forecast_etth1.py --data FOLDER [--only 96] [--fresh]

FOLDER (or the environment variable LOWTIDE_DATA) holds ``series/ETTh1.csv``, which is not part of
the project. Split: 12, 4 and 4 months of 30 days. A row is one horizon: fit, choice of the joint
paths and scores of all methods, with the settings that `lowtide backtest` has without options.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from common import ResultFile

import lowtide

ABOUT = (
    "ETTh1 (7 series, hourly), fitted to 12 months and scored on every window of the last 4 of 20,"
    " values standardized by the 12 months; CRPS is the fair one"
)
HORIZONS = (96, 192, 336, 720)
SAMPLES = 200


def main() -> None:
    """Measure the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("LOWTIDE_DATA"))
    parser.add_argument("--only", type=int, action="append", help="these horizons")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("--data or LOWTIDE_DATA is needed")
    table = Path(arguments.data) / "series" / "ETTh1.csv"
    packages = ("pandas", "scoringrules")
    result = ResultFile("forecast_etth1", about=ABOUT, fresh=arguments.fresh, packages=packages)
    for horizon in arguments.only or HORIZONS:
        name = f"{horizon} steps"
        if result.has(name):
            continue
        started = time.process_time()
        report = lowtide.backtest(table, horizons=[horizon], split="ett", samples=SAMPLES)
        seconds = round(time.process_time() - started, 1)
        scores = report.horizons[0].model_dump(exclude={"pit"})
        result.add(name, cpu_s=seconds, samples=report.samples, **scores)


if __name__ == "__main__":
    main()
