"""DLinear, trained in seconds: a baseline of forecasting.

Zeng et al., "Are Transformers Effective for Time Series Forecasting?", arXiv:2205.13504.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.models.forecaster.baselines import GaussianPaths, deviations
from lowtide.models.forecaster.paths import Distribution, PathSampler, Scaler
from lowtide.models.forecaster.windows import apply_to_differences, forward_fill, targets

_KERNEL, _BATCH, _STEPS, _RATE = 25, 256, 400, 2e-3
# Share of the windows, the last, whose errors say how large errors are; they are not trained on.
_HELD_BACK = 0.2


class DLinear(nn.Module):
    """One linear layer for the moving average of a look-back, one for what is left.

    Args:
        look_back: Steps seen, L.
        horizon: Steps ahead, H.
    """

    def __init__(self, look_back: int, horizon: int) -> None:
        super().__init__()
        self.trend = nn.Linear(look_back, horizon)
        self.rest = nn.Linear(look_back, horizon)
        for layer in (self.trend, self.rest):
            nn.init.constant_(layer.weight, 1 / look_back)
            nn.init.zeros_(layer.bias)

    def forward(self, past: Tensor) -> Tensor:
        """Return what follows ``past`` (B, L) as (B, H)."""
        half = _KERNEL // 2
        padded = nn.functional.pad(past[:, None], (half, half), mode="replicate")
        trend = nn.functional.avg_pool1d(padded, _KERNEL, stride=1)[:, 0]
        return self.trend(trend) + self.rest(past - trend)


@dataclass(frozen=True)
class DLinearForecaster:
    """A trained DLinear of all variables, with Gaussian errors by step and variable.

    Attributes:
        scaler: Standardizes a series in its own units.
        network: The network.
        look_back: Steps it sees.
        deviation: Standard deviation [H, D] of its errors, in the series' units.
        sampler: Draws standard normal errors.
    """

    scaler: Scaler
    network: DLinear
    look_back: int
    deviation: np.ndarray
    sampler: PathSampler

    @classmethod
    def fit(
        cls, values: np.ndarray, *, look_back: int, horizon: int, seed: int = 0
    ) -> DLinearForecaster:
        """Train on a series ``values`` [T, D], NaN where one is missing; the seed decides all."""
        scaler, known = Scaler.fit(values), np.isfinite(values)
        filled = forward_fill(scaler.transform(values))
        origins = np.arange(look_back, len(values) - horizon + 1)
        held = max(1, int(len(origins) * _HELD_BACK))
        # Targets of trained windows end where those of the held-back ones begin, where that leaves
        # enough to train on.
        trained = origins[: max(1, len(origins) - held - horizon)]
        network = _train(filled, known, trained, DLinear(look_back, horizon), seed)
        judged = origins[-held:]
        errors = targets(filled, judged, horizon) - _apply(network, filled, judged, look_back)
        deviation = deviations(errors, targets(known, judged, horizon)) * scaler.deviation
        return cls(scaler, network, look_back, deviation, GaussianPaths())

    def predict(self, values: np.ndarray, origins: np.ndarray) -> Distribution:
        """Return the distributions of what follows ``origins`` [n] of ``values`` [T, D]."""
        first = int(origins[0]) - self.look_back
        past = self.scaler.transform(values[first : int(origins[-1])])
        mean = self.scaler.inverse(_apply(self.network, past, origins - first, self.look_back))
        return Distribution(origins, mean, np.broadcast_to(self.deviation, mean.shape))


def _train(
    values: np.ndarray, known: np.ndarray, origins: np.ndarray, network: DLinear, seed: int
) -> DLinear:
    """Train for a fixed number of steps on windows drawn by ``seed``, rates falling to zero."""
    look_back, horizon = network.trend.in_features, network.trend.out_features
    draw = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    series, seen = (torch.from_numpy(array.T.copy()) for array in (values, known))
    steps = torch.arange(-look_back, horizon)
    for _ in range(_STEPS):
        variables = torch.from_numpy(draw.integers(len(series), size=_BATCH))[:, None]
        places = torch.from_numpy(draw.choice(origins, _BATCH))[:, None] + steps
        window, mask = series[variables, places].float(), seen[variables, places[:, look_back:]]
        last = window[:, look_back - 1 : look_back]
        ahead = network(window[:, :look_back] - last) + last
        error = (ahead - window[:, look_back:]) * mask
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def _apply(network: DLinear, values: np.ndarray, origins: np.ndarray, look_back: int) -> np.ndarray:
    """Return the forecasts [n, H, D] of what follows ``origins`` [n] of ``values`` [T, D]."""

    def run(past: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.from_numpy(past).float()).numpy()

    horizon = network.trend.out_features
    return apply_to_differences(values, origins, look_back, horizon, run)
