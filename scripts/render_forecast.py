"""The tables of forecasts; see ``render_results.py``."""

from __future__ import annotations

from collections.abc import Callable

from tables import NONE, Rows, table

# A score's name in a result file, its title and its digits.
STEPS = {
    "mse": ("MSE", 4),
    "mae": ("MAE", 4),
    "crps": ("CRPS", 4),
    "wql": ("weighted quantile loss", 4),
    "coverage90": ("in the 90 % band", 3),
    "winkler90": ("its Winkler score", 3),
}
JOINT = {
    "energy": ("energy score", 2),
    "crps_sum24": ("CRPS of 24-step sums", 2),
    "crps_max24": ("of 24-step maxima", 3),
}


def forecast_etth1(rows: Rows) -> str:
    """The forecaster at each horizon, then all methods at each."""
    head = ["horizon", *(title for title, _ in STEPS.values()), "processor seconds"]
    cells = [
        [str(row["horizon"]), *_cells(row["scores"]["ridge"], STEPS), f"{row['cpu_s']:.0f}"]
        for row in rows
    ]
    parts = ["The forecaster, with its default settings:", table(head, cells)]
    for row in rows:
        all_scores = {**STEPS, **JOINT}
        head = ["method", *(title for title, _ in all_scores.values())]
        cells = [[name, *_cells(one, all_scores)] for name, one in row["scores"].items()]
        parts += [
            f"{row['horizon']} steps, {row['windows']:,} windows with {row['samples']} samples;"
            f" `ridge` is the forecaster, whose joint paths are by {row['paths']}; energy, sums and"
            f" maxima are of {row['joint_windows']:,} windows with {row['joint_samples']} samples:",
            table(head, cells),
        ]
    return "\n\n".join(parts)


def _cells(scores: dict[str, float], shown: dict[str, tuple[str, int]]) -> list[str]:
    return [
        NONE if (value := scores.get(name)) is None else f"{value:.{digits}f}"
        for name, (_, digits) in shown.items()
    ]


SHAPES: dict[str, Callable[[Rows], str]] = {"forecast_etth1": forecast_etth1}
