"""Noise of a volume from its neighbors in the series: Noise2Noise with a linear predictor.

A volume's voxels are predicted from the 3 × 3 voxels around the same place in the volumes before
and after, by ridge regression with the noisy volume itself as target. The noise of the neighbors is
independent of the target's, so that the prediction cannot follow it. What the neighbors do not
explain, such as another direction of diffusion, is smooth: the second difference of the residual,
as of photographs (`lowtide.models.denoiser.noise_level`), removes it. It leaves the target's white
noise and, through the weights w, that of the neighbors: σ²·(1 + |v|²), where v is w after the
filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.models.denoiser.noise_models import RicianNoise
from lowtide.models.denoiser.noise_statistics import NORMAL_MEDIAN

_RIDGE = 1e-6  # of the mean variance of the inputs: equal volumes are collinear
_ROUNDS = 20
_FILTER = np.outer([1, -2, 1], [1, -2, 1]) / 6
_REACH = 5  # of the filter over predictions of 3 × 3 voxels
# A median absolute deviation tells a standard deviation with 1.65 times the error of the
# mean square's 1 / √(2n).
_MEDIAN_ERROR = 1.65 / math.sqrt(2)


@dataclass(frozen=True)
class NeighborNoise:
    """Standard deviation of the Rician noise of a volume in data units, with its error."""

    std: float
    error: float
    voxels: int


class NeighborStatistics:
    """Voxels of one volume with those of its neighbors, every ``stride``-th of the foreground."""

    def __init__(self, threshold: float, stride: int) -> None:
        self._threshold, self._stride, self._seen = threshold, stride, 0
        self._inputs: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []

    def add(self, target: np.ndarray, neighbors: Sequence[np.ndarray]) -> None:
        """Add a slice (H, W) and the same of neighboring volumes, float32 in data units.

        Voxels closer than two to an edge are left out.
        """
        if min(target.shape) < _REACH:
            return
        height, width = (size - _REACH + 1 for size in target.shape)
        places = np.arange(-self._seen % self._stride, height * width, self._stride)
        self._seen += height * width
        at = np.unravel_index(places, (height, width))
        around = np.stack([_windows(one, _REACH)[at] for one in neighbors], 1, dtype=np.float64)
        own = _windows(target[1:-1, 1:-1], 3)[at].astype(np.float64)
        finite = np.isfinite(around).all((1, 2, 3)) & np.isfinite(own).all((1, 2))
        around[~finite] = 0
        # Chosen by the neighbors alone: the target's noise must not decide.
        used = finite & (around.mean((1, 2, 3)) > self._threshold)
        self._inputs.append(around[used])
        self._targets.append(own[used])

    def result(self) -> NeighborNoise | None:
        """Return the noise, or None where fewer than 10 voxels a weight are foreground."""
        if not self._inputs:
            return None
        inputs, targets = np.concatenate(self._inputs), np.concatenate(self._targets)
        voxels, volumes = inputs.shape[:2]
        if voxels < 10 * 9 * volumes:
            return None
        weights, offset = _ridge(inputs[:, :, 1:-1, 1:-1].reshape(voxels, -1), targets[:, 1, 1])
        weights = weights.reshape(volumes, 3, 3)
        # The prediction at the center and the eight voxels around it.
        windows = np.lib.stride_tricks.sliding_window_view(inputs, (3, 3), axis=(2, 3))
        predicted = np.einsum("nvyxij,vij->nyx", windows, weights) + offset
        residual = np.abs(np.einsum("nyx,yx->n", targets - predicted, _FILTER))
        spread = float(np.median(residual)) / NORMAL_MEDIAN
        spread /= math.sqrt(1 + _squared_norm(weights))
        std = _rician_std(spread, predicted[:, 1, 1])
        return NeighborNoise(std, std * _MEDIAN_ERROR / math.sqrt(voxels), voxels)


def _windows(image: np.ndarray, side: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(image, (side, side))


def _ridge(inputs: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights (K,) and the offset that predict ``wanted`` (N,) from inputs (N, K)."""
    means, mean = inputs.mean(0), float(wanted.mean())
    centered = inputs - means
    gram = centered.T @ centered
    ridge = _RIDGE * np.trace(gram) / len(gram) + np.finfo(float).tiny
    weights = np.linalg.solve(gram + ridge * np.eye(len(gram)), centered.T @ (wanted - mean))
    return weights, mean - float(means @ weights)


def _squared_norm(weights: np.ndarray) -> float:
    """Return the sum of squares of weights (V, 3, 3) after the filter."""
    padded = np.pad(weights, ((0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return float((np.einsum("vyxij,ij->vyx", windows, _FILTER) ** 2).sum())


def _rician_std(spread: float, means: np.ndarray) -> float:
    """Return the parameter of Rician noise whose magnitudes of these means spread that much.

    At a mean m the clean value is about √(m² - std²).
    """
    std = spread
    if std <= 0:
        return 0.0
    for _ in range(_ROUNDS):
        clean = np.sqrt(np.maximum(means**2 - std**2, 0))
        shares = RicianNoise(std=std).sigma(clean) / std
        std = spread / math.sqrt(float(np.mean(shares**2)))
    return std
