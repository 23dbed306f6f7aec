"""Histories and their windows: look-backs and targets at forecast origins, and what is fitted.

A series is an array [T, D] of T steps and D variables. A forecast's origin is the number of steps
known to it: its look-back ends before step ``origin``, its targets begin there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Rows of a matrix product. Every product has exactly as many, so that a window's forecast does not
# depend on the windows that are computed with it.
CHUNK_ROWS = 512
_FEWEST_ERRORS = 8


def look_backs(values: np.ndarray, origins: np.ndarray, length: int) -> np.ndarray:
    """Return the look-back windows [D, n, length] of ``values`` [T, D] at ``origins`` [n]."""
    first = int(origins.min()) - length
    # What is not looked at is not copied: of wide tables a chunk is a window or a few.
    by_variable = np.ascontiguousarray(values[first : int(origins.max())].T)
    return sliding_window_view(by_variable, length, axis=1)[:, origins - length - first]


def target_windows(values: np.ndarray, origins: np.ndarray, horizon: int) -> np.ndarray:
    """Return what follows ``origins`` [n] in ``values`` [T, D] as an array [n, horizon, D]."""
    return values[origins[:, None] + np.arange(horizon)]


def chunk_windows(variables: int, rows: int = CHUNK_ROWS) -> int:
    """Return how many windows of ``variables`` make about ``rows`` rows."""
    return max(1, rows // variables)


def numbered_chunks(
    origins: np.ndarray, variables: int, rows: int = CHUNK_ROWS
) -> Iterator[tuple[int, np.ndarray]]:
    """Split ``origins`` into chunks of about ``rows`` rows; yields (index of the first, chunk)."""
    size = chunk_windows(variables, rows)
    for start in range(0, len(origins), size):
        yield start, origins[start : start + size]


def forecast_differences(
    values: np.ndarray,
    origins: np.ndarray,
    look_back: int,
    horizon: int,
    function: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return forecasts [n, horizon, D] at ``origins`` [n] of ``values`` [T, D].

    ``function`` maps look-backs less their last value, (N, look_back), to what follows less that
    value, (N, horizon). It always gets as many rows, so that a forecast is bit-identical whatever
    others are computed with it.
    """
    variables = values.shape[1]
    result = np.empty((len(origins), horizon, variables))
    padded = np.zeros((chunk_windows(variables) * variables, look_back))
    for start, chunk in numbered_chunks(origins, variables):
        past = look_backs(values, chunk, look_back).reshape(-1, look_back)
        last = past[:, -1:]
        padded[: len(past)] = past - last
        ahead = function(padded)[: len(past)] + last
        ahead = ahead.reshape(variables, len(chunk), horizon)
        result[start : start + len(chunk)] = ahead.transpose(1, 2, 0)
    return result


def forward_fill(values: np.ndarray) -> np.ndarray:
    """Return ``values`` [T, D] with each NaN replaced by the last value before it.

    Steps before a variable's first value get that value; a variable without any gets zeros.
    """
    known = np.isfinite(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values))[:, None], -1), axis=0)
    first = np.where(known.any(0), known.argmax(0), 0)
    filled = np.take_along_axis(values, np.where(last >= 0, last, first), axis=0)
    return np.where(known.any(0), filled, 0.0)


def few_errors(counts: np.ndarray) -> np.ndarray:
    """Return where there are too few errors to judge by, of ``counts`` [H, D] of them.

    The variable that has the most at a step has enough.
    """
    return counts < np.minimum(_FEWEST_ERRORS, counts.max(axis=1, keepdims=True))


def interpolate(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return ``values`` [T, D], those not ``known`` on lines between the neighbors that are."""
    result, steps = values.copy(), np.arange(len(values))
    for variable in np.flatnonzero(~known.all(axis=0) & known.any(axis=0)):
        places = np.flatnonzero(known[:, variable])
        result[:, variable] = np.interp(steps, places, values[places, variable])
    return result


def past_means(values: np.ndarray, origins: np.ndarray, length: int) -> np.ndarray:
    """Return means [n, D] of the ``length`` steps of ``values`` [T, D] before each origin."""
    means = np.empty((len(origins), values.shape[1]))
    for start, chunk in numbered_chunks(origins, values.shape[1]):
        # Windows are copied, so that a mean has the same bits whatever others are with it.
        means[start : start + len(chunk)] = look_backs(values, chunk, length).mean(axis=-1).T
    return means


@dataclass(frozen=True)
class SeriesHistory:
    """The first part of several series.

    Attributes:
        values: Series [T, D] in their own units, NaN where a value is missing; every variable has
            one at least.
        season: Steps of a season; 1 for none.
    """

    values: np.ndarray
    season: int

    @cached_property
    def filled(self) -> np.ndarray:
        """Values [T, D], each missing one that before it."""
        return forward_fill(self.values)

    @cached_property
    def first(self) -> np.ndarray:
        """Step [D] of the first value of each variable; T for one that has none."""
        known = np.isfinite(self.values)
        return np.where(known.any(axis=0), known.argmax(axis=0), len(known))

    def until(self, step: int) -> SeriesHistory:
        """Return what was known at ``step``."""
        return SeriesHistory(self.values[:step], self.season)


class FittedMethod(Protocol):
    """A method fitted to the first part of D series."""

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviation [D] of errors one step ahead."""
        ...

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        ...

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        ...


@dataclass(frozen=True)
class GroupedMethod:
    """A method fitted to variables that begin together, group by group; NaN for those without.

    Attributes:
        shape: Steps ahead and variables, (H, D).
        parts: The variables of each group, the step that they begin at, and what was fitted.
    """

    shape: tuple[int, int]
    parts: tuple[tuple[np.ndarray, int, FittedMethod], ...]

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviation [D] of errors one step ahead."""
        found = np.full(self.shape[1], np.nan)
        for columns, _, fitted in self.parts:
            found[columns] = fitted.deviation
        return found

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        found = np.full(self.shape, np.nan)
        for columns, _, fitted in self.parts:
            found[:, columns] = fitted.growth
        return found

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        found = np.full((len(origins), *self.shape), np.nan)
        for columns, first, fitted in self.parts:
            found[..., columns] = fitted.predict(values[first:, columns], origins - first)
        return found


@dataclass(frozen=True)
class MeanMethod:
    """The mean of several methods, of each variable of those that could be fitted to it."""

    parts: tuple[FittedMethod, ...]

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviation [D] of errors one step ahead."""
        return present_mean([one.deviation for one in self.parts])

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        return present_mean([one.growth for one in self.parts])

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        return present_mean([one.predict(values, origins) for one in self.parts])


def present_mean(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the mean of several arrays where they are numbers; NaN where none is."""
    total, count = np.zeros_like(arrays[0]), np.zeros(arrays[0].shape, int)
    for one in arrays:
        total += np.where(np.isfinite(one), one, 0.0)
        count += np.isfinite(one)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
