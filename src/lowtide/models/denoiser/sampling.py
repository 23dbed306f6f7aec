"""Sampling from a measurement: from its noise level down to none, in a few steps.

The measurement is the first state. Every step predicts the clean image, and the next state keeps a
part of the noise that was found and may add new noise; the last one is the clean image itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.philox import philox
from lowtide.models.denoiser.noise_schedule import NoiseSchedule
from lowtide.models.denoiser.slim_unet_config import TIMES

# States span 0..1 here, and -1..1 in terms of the schedule.
_SPAN = 2
_PURPOSE = 0x6E6F697365  # "noise": apart from what other parts of the library draw


@dataclass(frozen=True)
class SamplingStep:
    """One step from noise of ``sigma`` to noise of ``next_sigma``, of values in 0..1.

    ``kept`` is the share of the noise found that stays, and ``drawn`` the standard deviation of the
    noise added.
    """

    index: int
    sigma: float
    next_sigma: float
    kept: float
    drawn: float

    def advance(self, state: np.ndarray, clean: np.ndarray, seed: int, first: int) -> np.ndarray:
        """Return rows of the next state from those of this one and the clean image.

        Arrays are float32 (N, W, C); ``first`` is the first row's place in the image.
        """
        if self.next_sigma == 0:
            return clean
        moved = clean + np.float32(self.kept) * (state - clean)
        if self.drawn:
            moved += np.float32(self.drawn) * row_noise(seed, 0, self.index, first, state.shape)
        return moved


def sampling_steps(
    schedule: NoiseSchedule, sigma: float, count: int, eta: float
) -> list[SamplingStep]:
    """Return ``count`` steps, equal in the schedule's time, from a level to none.

    Args:
        sigma: Level of the measurement, of values in 0..1.
        eta: 0 adds no noise (DDIM), and 1 as much as the forward process would have (DDPM).

    Raises:
        UsageError: ``count`` is not 1 to T, or the schedule does not reach the level.
    """
    if not 1 <= count <= TIMES:
        raise UsageError(
            f"{count} steps are not between 1 and the {TIMES} times of a schedule", hint="--steps 4"
        )
    time = schedule.time_of(_SPAN * sigma)
    times = (time * left / count for left in range(count - 1, 0, -1))
    # The first level is the measurement's own, and the last is exactly none.
    levels = [sigma, *(schedule.sigma_at(one) / _SPAN for one in times)]
    steps = []
    for index, (now, after) in enumerate(zip(levels, [*levels[1:], 0.0], strict=True)):
        drawn = eta * after * math.sqrt(1 - (after / now) ** 2) if now else 0.0
        kept = math.sqrt(after**2 - drawn**2) / now if now else 0.0
        steps.append(SamplingStep(index, now, after, kept, drawn))
    return steps


def row_noise(seed: int, sample: int, step: int, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 standard normal noise (N, W, C) for N rows from ``first`` on.

    A row's noise depends on the seed, the sample, the step and the row alone: it is the same for
    every band, batch and device.
    """
    rows = [
        philox(seed, _PURPOSE + step, sample, row).standard_normal(shape[1:], np.float32)
        for row in range(first, first + shape[0])
    ]
    return np.stack(rows)
