"""Effects of columns that are known ahead, such as holidays and prices, on each series.

They are taken off before a method is fitted and added to what it forecasts, so that every method
knows of them. An effect is what a column moves within a season: slow movements, which two series
may share by chance, are taken off both first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.windows import interpolate

# Standard errors that an effect has at least.
_CLEAR = 3.0
_SHORTEST_WINDOW = 5


@dataclass(frozen=True)
class KnownEffects:
    """Linear effects of K columns on D series.

    Attributes:
        slopes: Effects [K, D] of one unit, 0 where none is clear.
        center: Means [D, K] of the columns, at which they have no effect; [1, K] where all series
            have the same.
    """

    slopes: np.ndarray
    center: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, known: np.ndarray, season: int) -> KnownEffects:
        """Fit to a history.

        Args:
            values: Series [T, D] in their own units, NaN where a value is missing.
            known: The columns [T, D, K], or [T, 1, K] where all series have the same; NaN where
                there is no value of the series either.
            season: Steps of a season; 1 for none.
        """
        steps, own, columns = known.shape
        flat = known.reshape(steps, -1)
        flat = interpolate(flat, np.isfinite(flat))
        center = flat.mean(axis=0).reshape(own, columns)
        window = max(season, _SHORTEST_WINDOW) // 2 * 2 + 1
        if len(values) <= 2 * window:
            return cls(np.zeros((columns, values.shape[1])), center)
        finite = np.isfinite(values)
        movements = _movements(interpolate(values, finite), window, season)
        moved = _movements(flat, window, season).reshape(known.shape)
        slopes = [
            _clear_slopes(movements[rows, one], moved[rows, one % own], season)
            for one, rows in enumerate(finite.T)
        ]
        return cls(np.stack(slopes, axis=1), center)

    def of(self, known: np.ndarray) -> np.ndarray:
        """Return the effects [..., D] of columns ``known`` [..., D, K] or [..., 1, K]; 0 of NaN."""
        return np.einsum("...dk,kd->...d", np.nan_to_num(known - self.center), self.slopes)

    @property
    def used(self) -> np.ndarray:
        """Mask [K] of columns that have an effect on any series."""
        return np.asarray((self.slopes != 0).any(axis=1))


def _movements(values: np.ndarray, window: int, season: int) -> np.ndarray:
    """Return ``values`` [T, D] less their mean over a window around each, and of each phase."""
    half = window // 2
    padded = np.pad(values, ((half + 1, half), (0, 0)), mode="edge")
    padded[0] = 0.0
    total = padded.cumsum(axis=0)
    rest = values - (total[window:] - total[:-window]) / window
    if season > 1 and len(values) >= 2 * season:
        for phase in range(season):
            rest[phase::season] -= rest[phase::season].mean(axis=0)
    return rest


def _clear_slopes(series: np.ndarray, columns: np.ndarray, season: int) -> np.ndarray:
    """Return slopes [K] of ``columns`` [n, K] in a ``series`` [n]: those that are no chance."""
    slopes = np.zeros(columns.shape[1])
    kept = np.flatnonzero(columns.std(axis=0) > 1e-9 * (np.abs(columns).max(axis=0) + 1e-300))
    while len(kept):
        chosen = columns[:, kept]
        found, _, rank, _ = np.linalg.lstsq(chosen, series, rcond=None)
        free = len(series) - len(kept) - season
        if free < 1 or rank < len(kept):
            return slopes
        rest = series - chosen @ found
        variance = float(rest @ rest) / free * np.diagonal(np.linalg.inv(chosen.T @ chosen))
        clear = np.abs(found) > _CLEAR * np.sqrt(variance)
        if clear.all():
            slopes[kept] = found
            return slopes
        kept = kept[clear]  # the others' slopes are those without the ones that left
    return slopes
