"""Report of a backtest: the scores of each method at each horizon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel

from lowtide.core.schema import SCHEMA_VERSION

_METHOD_WIDTH, _WIDTH = 27, 12
# The scores that are printed.
_SHOWN = "mase", "smape", "mae", "mse", "crps", "coverage80", "coverage95", "energy"


class HorizonScores(BaseModel):
    """Scores of one horizon, by the name of the method, and the windows they are means of.

    ``paths`` is the sampler of the forecaster's joint paths, ``path_energy`` what that was chosen
    by, and ``chosen`` has the method it took for each series. ``pit`` has the shares of targets in
    each tenth of their forecast distribution.
    """

    horizon: int
    windows: int
    joint_windows: int
    joint_samples: int
    paths: str
    path_energy: dict[str, float]
    chosen: dict[str, str] = {}
    scores: dict[str, dict[str, float]]
    by_series: dict[str, dict[str, dict[str, float]]] = {}
    pit: dict[str, list[float]]


class BacktestReport(BaseModel):
    """Report of a backtest.

    Scores are of values standardized by the training part, over all windows of the test part, none
    left out. ``mse`` and ``mae`` are of the mean; ``mase`` is its absolute error in units of that
    of repeating the last season, in the training part, and ``smape`` in percent of the mean size
    of forecast and truth. ``crps`` is the fair one of the samples, ``wql`` the weighted quantile
    loss at .1 to .9, ``coverage80``, ``90`` and ``95`` the shares inside of bands, and
    ``winkler90`` the Winkler score of one. ``energy``, and the CRPS of sums and maxima of 24 steps,
    are of ``joint_windows`` evenly spaced windows with ``joint_samples`` paths each, as are all
    scores of diffusion paths. ``until`` is the last stamp that a trained ``model`` was trained on.
    """

    schema_version: int = SCHEMA_VERSION
    model: str = "auto"
    until: str | None = None
    series: int
    history: int
    frequency: str
    split: str
    train_steps: int
    test_steps: int
    samples: int
    seed: int
    horizons: list[HorizonScores]
    notes: list[str] = []

    def __str__(self) -> str:
        lines = [
            f"{self.series} series, {self.history:,} steps ({self.frequency}): fitted to the first"
            f" {self.train_steps:,}, scored on the last {self.test_steps:,}"
        ]
        if self.until is not None:
            few = self.horizons[0].joint_samples
            lines.append(
                f"ridge is {self.model}, trained on data until {self.until}; all scores of its"
                " diffusion paths are of the windows of joint scores, 24 steps apart or more, with"
                f" {few} samples in at most 10 steps of the sampler"
            )
        for one in self.horizons:
            lines += ["", *_table(one)]
        return "\n".join([*lines, *(f"note: {text}" for text in self.notes)])


def _table(one: HorizonScores) -> list[str]:
    model, first = next(iter(one.scores.items()))
    names = [name for name in _SHOWN if name in first]
    lines = [
        f"{one.horizon:,} steps ahead, {one.windows:,} windows; {_words(model, one)};"
        f" energy is of {one.joint_windows:,} windows; --json has more",
        _row("", names),
    ]
    for method, scores in one.scores.items():
        lines.append(_row(method, [_number(scores.get(name)) for name in names]))
    return lines


def _words(model: str, one: HorizonScores) -> str:
    """Return what the forecaster is: its methods, and its paths."""
    counts = Counter(one.chosen.values()).most_common()
    taken = [name if len(counts) == 1 else f"{name} of {count:,} series" for name, count in counts]
    paths = f"with {one.paths} paths"
    return " ".join([model, "is", *([] if taken in ([], [model]) else [", ".join(taken)]), paths])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:{_METHOD_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
