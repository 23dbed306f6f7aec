"""Report of a forecast, in the words of those who use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.forecast.trained import DIFFUSION
from lowtide.models.forecaster.bands import ENOUGH_WINDOWS
from lowtide.models.forecaster.methods import AUTO, ETS, MEAN, NAIVE, PLAIN, RIDGE, THETA

if TYPE_CHECKING:
    from lowtide.jobs.forecast.source import TableForecaster
    from lowtide.models.forecaster.choice import ForecasterChoice


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


_WORDS = {
    NAIVE: "seasonal naive with drift",
    ETS: "ETS",
    THETA: "Theta",
    MEAN: "mean of naive, ETS and Theta",
    PLAIN: "one plain ridge regression",
    RIDGE: "four ridge regressions",
    "dlinear": "DLinear",
}


class SeriesMethodReport(BaseModel):
    """The ``method`` of a series, and the CRPS of each method on what it was not fitted to."""

    method: str
    scores: dict[str, float]


class ForecastReport(BaseModel):
    """Report of a forecast.

    ``history`` counts the steps of the table. ``methods`` counts the series of each method, and
    ``by_series`` has what each was chosen by. Where series end at different steps, what is said of
    held-out forecasts and of paths is that of those which end last. ``held_out`` is the number of
    forecasts that methods were judged on without having seen what came, ``windows`` how many of
    them do not overlap, and
    ``against_repeating`` the mean ratio of their CRPS to that of repeating the last season, None
    where it is not known. ``held95`` is the mean share of the later of them inside of 95 % bands
    made of the earlier ones. ``look_backs`` are the steps that each of four ridges sees.
    ``residual_paths`` counts the paths of errors that samples are drawn from, by the sampler
    ``paths``; ``path_energy`` has the energy scores it was chosen by. ``until`` is the last stamp
    that a trained ``model`` was trained on; without one, that is the end of the table. ``notes``
    are sentences on what was repaired in the table or left out, and attention backends that cannot
    run.
    """

    schema_version: int = SCHEMA_VERSION
    model: str = AUTO
    until: str | None = None
    series: int
    history: int
    frequency: str
    season: int
    horizon: int
    samples: int
    quantile_levels: tuple[float, ...]
    intervals: tuple[float, ...] = ()
    seed: int
    methods: dict[str, int] = {}
    by_series: dict[str, SeriesMethodReport] = {}
    held_out: int = 0
    windows: float = 0.0
    against_repeating: float | None = None
    held95: float | None = None
    look_backs: tuple[int, ...]
    residual_paths: int
    paths: str
    path_energy: dict[str, float]
    outputs: list[str] = []
    notes: list[str] = []

    def __str__(self) -> str:
        series = f"{self.series:,} series" if self.series > 1 else "1 series"
        season = f"season of {self.season:,}" if self.season > 1 else "no season"
        lines = [
            f"{series} of {self.history:,} steps ({self.frequency}, {season}),"
            f" {self.horizon:,} ahead"
        ]
        if self.until is not None:
            made = "learned from" if self.paths == DIFFUSION else "of"
            lines.append(
                f"{self.model}, trained on data until {self.until}: {self.paths} paths {made}"
                f" {self.residual_paths:,} errors"
            )
        else:
            lines += self._method_lines()
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join([*lines, *(f"written: {path}" for path in self.outputs)])

    def _method_lines(self) -> list[str]:
        """Return sentences on the methods, how good they were, and what their bands are worth."""
        parts = [
            _WORDS[name] + (f" for {count:,} series" if self.series > 1 else "")
            for name, count in self.methods.items()
        ]
        chosen = "chosen on what came after its fit" if self.held_out else "the usual one"
        how = f", {chosen}" if self.model == AUTO else ""
        lines = [f"method: {', '.join(parts)}{how}"]
        ratio = self.against_repeating
        if ratio is not None:
            side = "below" if ratio <= 1 else "above"
            lines.append(
                f"error on {self.held_out:,} forecasts of what it had not seen:"
                f" {abs(1 - ratio):.0%} {side} that of repeating the last"
                f" {'value' if self.season == 1 else 'season'}"
            )
        if self.held95 is not None:
            lines.append(
                f"95 % bands, made of the earlier of these, held {self.held95:.0%} of the later"
            )
        if self.windows < ENOUGH_WINDOWS:
            lines.append(
                f"bands are guesses: {self.held_out:,} held-out errors of"
                f" {max(1, round(self.windows)) if self.held_out else 0:,} separate stretches,"
                f" where {ENOUGH_WINDOWS} would check them"
            )
        return lines


def source_facts(sources: Sequence[TableForecaster], place: int | None) -> dict[str, Any]:
    """Return what a report says of forecasters, of all series or the one at a place."""
    first = sources[0]  # of the series that end last
    ridges = getattr(first.forecaster, "ridges", ())
    common = {
        "until": first.until,
        "look_backs": tuple(len(matrix) for matrix in ridges),
        "residual_paths": len(first.forecaster.residuals),
        "paths": first.paths.name,
        "path_energy": first.paths.energy,
    }
    by_series, methods = dict[int, tuple[str, SeriesMethodReport]](), Counter[str]()
    ratios, held = list[float](), list[float]()
    judged: ForecasterChoice | None = None
    for source in sources:
        choice = source.choice
        for one, whole in enumerate(source.places.tolist()):
            if choice is None or place not in (None, whole):
                continue
            judged = judged or choice
            name = choice.chosen[one]
            scores = {key: float(found[one]) for key, found in choice.scores.items()}
            known = {key: score for key, score in scores.items() if np.isfinite(score)}
            facts = SeriesMethodReport(method=name, scores=known)
            by_series[whole] = source.table.names[one], facts
            methods[name] += 1
            if choice.held is not None and np.isfinite(choice.held[one]):
                held.append(float(choice.held[one]))
            if name in known and choice.repeating[one] > 0:
                ratios.append(known[name] / float(choice.repeating[one]))
    if judged is None:
        return common
    return {
        **common,
        "methods": dict(methods.most_common()),
        "by_series": dict(by_series[one] for one in sorted(by_series)),
        "held_out": judged.held_out,
        "windows": judged.windows,
        "against_repeating": float(np.mean(ratios)) if ratios else None,
        "held95": float(np.mean(held)) if held else None,
    }
