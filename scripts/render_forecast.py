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


def ldm4ts_etth1(rows: Rows) -> str:
    """Each row beside the others: scores, then what its training found."""
    scores = {
        **JOINT,
        "energy": ("energy score", 3),
        "crps": STEPS["crps"],
        "coverage90": STEPS["coverage90"],
    }
    head = ["row", *(title for title, _ in scores.values()), "deviation", "energy gained"]
    head += ["strength", "`error_share`", "processor seconds to train"]
    cells = []
    for row in rows:
        gain = f"{row['energy_gain']:.3f} ± {row['energy_gain_error']:.3f}"
        training = [NONE] * 3
        if "strength" in row:
            training = [f"{row['strength']:.2f}", f"{row['error_share']:.4f}"]
            training.append(f"{row['train_s']:.0f}")
        cells.append([row["row"], *_cells(row, scores), f"{row['deviation']:.3f}", gain, *training])
    steps = next((row["steps"] for row in rows if "steps" in row), 0)
    return (
        f"{rows[0]['windows']} windows; each training takes {steps} steps. Energy gained is that of"
        " `bootstrap, backbone` less the row's, with the standard error of the mean over windows,"
        " which overlap; deviation is that of samples as a share of the residual paths';"
        f" `error_share` is of the windows held out in training:\n\n{table(head, cells)}"
    )


SHAPES: dict[str, Callable[[Rows], str]] = {
    "forecast_etth1": forecast_etth1,
    "ldm4ts_etth1": ldm4ts_etth1,
}
