"""What was a season ago, and a drift as far as it is more than chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Naive:
    """Seasonal naive with drift of D series.

    Attributes:
        season: Steps of a season; 1 repeats the last value.
        horizon: Steps ahead, H.
        drift: What a series [D] gains in each season.
        deviation: Standard deviation [D] of its changes from season to season; NaN of one value.
    """

    season: int
    horizon: int
    drift: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, values: np.ndarray, season: int, horizon: int) -> Naive:
        """Fit to ``values`` [T, D] without NaN; too few for a season have none."""
        season = season if len(values) > season + 1 else 1
        if len(values) == 1:
            nothing = np.zeros(values.shape[1])
            return cls(season, horizon, nothing, np.full_like(nothing, np.nan))
        changes = values[season:] - values[:-season]
        drift, freedom = changes.mean(axis=0), max(len(changes) - 1, 1)
        around = np.square(changes - drift).sum(axis=0) / freedom
        # What a drift is worth: its square beside that of its own error, of changes that overlap.
        error = around / max(len(changes) / season, 1.0) if len(changes) > 1 else np.inf
        drift = drift * (np.square(drift) / np.maximum(np.square(drift) + error, 1e-300))
        deviation = np.sqrt(np.square(changes - drift).sum(axis=0) / freedom)
        return cls(season, horizon, drift, deviation)

    @property
    def growth(self) -> np.ndarray:
        """Standard deviation [H, D] of errors by step, in units of that of the first."""
        seasons = np.arange(self.horizon) // self.season + 1
        return np.repeat(np.sqrt(seasons)[:, None], len(self.drift), axis=1)

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        ahead = np.arange(self.horizon)
        mean = values[origins[:, None] - self.season + ahead % self.season]
        return mean + (ahead // self.season + 1)[:, None] * self.drift
