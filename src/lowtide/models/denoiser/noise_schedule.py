"""Noise schedules: the noise level at each time, and the time at which a level is reached.

Levels are relative to the data (sigma of x = x₀ + sigma·n), whatever the schedule scales its states
by: a measurement with noise of that level is the state at that time.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.models.denoiser.slim_unet_config import TIMES, Prediction

ScheduleName = Literal["linear", "cosine", "flow"]


class NoiseSchedule:
    """Increasing noise levels at the times 1 to T; at time 0 there is none.

    Args:
        name: ``linear`` has betas from 1e-4 to 0.02 (DDPM), ``cosine`` those of the improved DDPM,
            and ``flow`` mixes data and noise in proportion to time.
        zero_terminal_snr: Rescale the levels so that nothing of the data is left at time T (arXiv
            2305.08891). ``flow`` is so by itself.
    """

    def __init__(self, name: ScheduleName = "linear", *, zero_terminal_snr: bool = False) -> None:
        times = np.arange(1, TIMES + 1) / TIMES
        if name == "flow":
            kept = 1 - times
            signal = kept**2 / (kept**2 + times**2)
        elif name == "cosine":
            edges = np.cos((np.append(0, times) + 0.008) / 1.008 * np.pi / 2) ** 2
            signal = np.cumprod(1 - np.minimum(1 - edges[1:] / edges[:-1], 0.999))
        else:
            signal = np.cumprod(1 - np.linspace(1e-4, 0.02, TIMES))
        if zero_terminal_snr and signal[-1] > 0:
            root = np.sqrt(signal)
            signal = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        self.name: ScheduleName = name
        with np.errstate(divide="ignore"):
            # At time 0 there is no noise, whatever the first level is.
            self._sigmas = np.append(0, np.sqrt((1 - signal) / signal))

    @property
    def max_sigma(self) -> float:
        """Level at time T: infinite with zero terminal SNR."""
        return float(self._sigmas[-1])

    def sigma_at(self, time: float) -> float:
        """Return the level at a time from 0 to T, linear between whole times."""
        if time >= TIMES:
            return self.max_sigma
        below = int(time)
        first, second = self._sigmas[below : below + 2]
        if time == below:
            return float(first)
        return float(first + (second - first) * (time - below))

    def time_of(self, sigma: float) -> float:
        """Return the time, from 0 to T, at which the level is ``sigma``.

        Raises `UsageError` for a level that the schedule does not reach.
        """
        above = int(np.searchsorted(self._sigmas, sigma))
        if above == 0:
            return 0.0
        if above > TIMES:
            raise UsageError(
                f"the schedule {self.name} ends at a noise level of {self.max_sigma:.3g} times the"
                f" data, below {sigma:.3g}",
                hint="zero terminal SNR reaches every level",
            )
        first, second = self._sigmas[above - 1 : above + 1]
        share = 1.0 if np.isinf(second) else (sigma - first) / (second - first)
        return float(above - 1 + share)

    def require(self, prediction: Prediction) -> None:
        """Raise `UsageError` where a prediction says nothing at the last time."""
        if prediction == "epsilon" and np.isinf(self.max_sigma):
            raise UsageError(
                "at zero SNR the noise is all there is: predicting it (epsilon) tells nothing of"
                " the data",
                hint="prediction v or sample",
            )
