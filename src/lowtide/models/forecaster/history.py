"""What a forecasting method is fitted to, and what a fitted one says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from lowtide.models.forecaster.windows import forward_fill


@dataclass(frozen=True)
class History:
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

    def until(self, step: int) -> History:
        """Return what was known at ``step``."""
        return History(self.values[:step], self.season)


class Fitted(Protocol):
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
class Grouped:
    """A method fitted to variables that begin together, group by group; NaN for those without.

    Attributes:
        shape: Steps ahead and variables, (H, D).
        parts: The variables of each group, the step that they begin at, and what was fitted.
    """

    shape: tuple[int, int]
    parts: tuple[tuple[np.ndarray, int, Fitted], ...]

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
class MeanOf:
    """The mean of several methods, of each variable of those that could be fitted to it."""

    parts: tuple[Fitted, ...]

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
