"""The tables of forecasts; see ``render_results.py``."""

from __future__ import annotations

from tables import NONE, Row, Rows, filled, joined, table, tabled

# Scores, by what heads call them.
STEPS = {
    "MSE": "{mse?:.4f}",
    "MAE": "{mae?:.4f}",
    "CRPS": "{crps?:.4f}",
    "weighted quantile loss": "{wql?:.4f}",
    "in the 90 % band": "{coverage90?:.3f}",
    "its Winkler score": "{winkler90?:.3f}",
}
JOINT = {
    "energy score": "{energy?:.2f}",
    "CRPS of 24-step sums": "{crps_sum24?:.2f}",
    "of 24-step maxima": "{crps_max24?:.3f}",
}


def forecast_etth1(rows: Rows) -> str:
    """The forecaster at each horizon, then all methods at each."""
    scores, every = " | ".join(STEPS.values()), " | ".join([*STEPS.values(), *JOINT.values()])
    own = table(
        f"horizon | {' | '.join(STEPS)} | processor seconds",
        [
            f"{row['horizon']} | {filled(row['scores']['ridge'], scores)} | {row['cpu_s']:.0f}"
            for row in rows
        ],
    )
    parts = ["The forecaster, with its default settings:", own]
    for row in rows:
        parts += [
            f"{row['horizon']} steps, {row['windows']:,} windows with {row['samples']} samples;"
            f" `ridge` is the forecaster, whose joint paths are by {row['paths']}; energy, sums and"
            f" maxima are of {row['joint_windows']:,} windows with {row['joint_samples']} samples:",
            table(
                " | ".join(["method", *STEPS, *JOINT]),
                [f"{name} | {filled(one, every)}" for name, one in row["scores"].items()],
            ),
        ]
    return joined(*parts)


def forecast_m3(rows: Rows) -> str:
    """Scores of each group beside peers, then what 1,000 series took."""
    names = {"mase": "MASE", "crps": "CRPS", "c80": "in the 80 % band", "c95": "in the 95 % band"}
    every = " | ".join([*(f"{{{name}:.3f}}" for name in names), "{cpu_s?:.3f}"])
    scored = [row for row in rows if "scores" in row]
    tables = table(
        " | ".join(["row", "method", *names.values(), "processor seconds each"]),
        [
            f"{row['row']} | {name} | {filled(one, every)}"
            for row in scored
            for name, one in row["scores"].items()
        ],
    )
    costs = [
        f"{row['row']} of 150 months took {row['cpu_s']:.0f} processor seconds and"
        f" {row['peak_mib']:,} MiB."
        for row in rows
        if "peak_mib" in row
    ]
    refused, total = (sum(row[name] for row in scored) for name in ("refused", "cases"))
    return joined(f"Refused: {refused} of {total} tables.", tables, *costs)


def ldm4ts_etth1(rows: Rows) -> str:
    """Each row beside the others: scores, then what its training found."""

    def training(row: Row) -> str:
        if "strength" not in row:
            return f"{NONE} | {NONE} | {NONE}"
        return filled(row, "{strength:.2f} | {error_share:.4f} | {train_s:.0f}")

    steps = next((row["steps"] for row in rows if "steps" in row), 0)
    scores = tabled(
        rows,
        f"row | {' | '.join(JOINT)} | CRPS | in the 90 % band | deviation | energy gained"
        " | strength | `error_share` | processor seconds to train",
        "{row} | {energy?:.3f} | {crps_sum24?:.2f} | {crps_max24?:.3f} | {crps?:.4f}"
        " | {coverage90?:.3f} | {deviation:.3f} | {energy_gain:.3f} ± {energy_gain_error:.3f}"
        " | {training}",
        training=training,
    )
    return (
        f"{rows[0]['windows']} windows; each training takes {steps} steps. Energy gained is that of"
        " `bootstrap, backbone` less the row's, with the standard error of the mean over windows,"
        " which overlap; deviation is that of samples as a share of the residual paths';"
        f" `error_share` is of the windows held out in training:\n\n{scores}"
    )


SHAPES = {
    "forecast_etth1": forecast_etth1,
    "forecast_m3": forecast_m3,
    "ldm4ts_etth1": ldm4ts_etth1,
}
