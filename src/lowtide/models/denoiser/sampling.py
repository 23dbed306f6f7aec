"""Sampling from a measurement: from its noise level down to none, in a few steps of a schedule.

The measurement is the first state. Every step predicts the clean image, and the next state keeps a
part of the noise that was found and may add new noise; the last one is the clean image itself.

Levels of a schedule are relative to the data (sigma of x = x₀ + sigma·n), whatever the schedule
scales its states by: a measurement with noise of that level is the state at that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.philox import philox_generator
from lowtide.models.denoiser.config import TIMES, SchedulerName

ScheduleName = Literal["linear", "flow"]

# States span 0..1 here, and -1..1 in terms of the schedule.
_SPAN = 2
_PURPOSE = 0x6E6F697365  # "noise": apart from what other parts of the library draw
# Earlier predictions that a step of these uses.
_EARLIER: dict[SchedulerName, int] = {"dpmsolver++": 1, "unipc": 2}


class NoiseSchedule:
    """Increasing noise levels at the times 1 to T; at time 0 there is none.

    Args:
        name: ``linear`` has betas from 1e-4 to 0.02 (DDPM), and ``flow`` mixes data and noise in
            proportion to time: at time T nothing of the data is left.
    """

    def __init__(self, name: ScheduleName = "linear") -> None:
        times = np.arange(1, TIMES + 1) / TIMES
        if name == "flow":
            kept = 1 - times
            signal = kept**2 / (kept**2 + times**2)
        else:
            signal = np.cumprod(1 - np.linspace(1e-4, 0.02, TIMES))
        self.name: ScheduleName = name
        with np.errstate(divide="ignore"):
            # At time 0 there is no noise, whatever the first level is.
            self._sigmas = np.append(0, np.sqrt((1 - signal) / signal))

    @property
    def max_sigma(self) -> float:
        """Level at time T: infinite where nothing of the data is left."""
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
                hint="--scheduler flow reaches every level",
            )
        first, second = self._sigmas[above - 1 : above + 1]
        share = 1.0 if np.isinf(second) else (sigma - first) / (second - first)
        return float(above - 1 + share)


@dataclass(frozen=True)
class SamplingStep:
    """One step from noise of ``sigma`` to noise of ``next_sigma``, of values in 0..1.

    The next state is the clean image predicted now, plus ``kept`` times the difference of the state
    from it, plus ``earlier`` times those of earlier predictions, the last one first, plus noise of
    the standard deviation ``drawn``.
    """

    index: int
    sigma: float
    next_sigma: float
    kept: float
    earlier: tuple[float, ...] = ()
    drawn: float = 0.0

    def advance(
        self,
        state: np.ndarray,
        clean: np.ndarray,
        earlier: Sequence[np.ndarray],
        *,
        seed: int,
        first: int,
    ) -> np.ndarray:
        """Return rows of the next state from those of this one and the predictions.

        Arrays are float32 (N, W, C); ``first`` is the first row's place in the image.
        """
        if self.next_sigma == 0:
            return clean
        moved = clean + np.float32(self.kept) * (state - clean)
        for share, one in zip(self.earlier, earlier, strict=True):
            moved += np.float32(share) * (one - clean)
        if self.drawn:
            moved += np.float32(self.drawn) * row_noise(seed, 0, self.index, first, state.shape)
        return moved


def sampling_steps(
    scheduler: SchedulerName,
    sigma: float,
    count: int,
    *,
    eta: float = 0.0,
) -> list[SamplingStep]:
    """Return ``count`` steps, equal in the schedule's time, from a level to none.

    Args:
        scheduler: ``dpmsolver++`` is the second-order multistep solver of arXiv 2211.01095, and
            ``unipc`` the same with the corrector of arXiv 2302.04867. Over one and two steps both
            are ``ddim``.
        sigma: Level of the measurement, of values in 0..1, above 0.
        eta: Share of ddpm's noise that ``ddim`` adds.

    Raises:
        UsageError: ``count`` is not 1 to T, the level is not above 0, or the schedule does not
            reach it.
    """
    if not 1 <= count <= TIMES:
        raise UsageError(
            f"{count} steps are not between 1 and the {TIMES} times of a schedule", hint="--steps 4"
        )
    if not (math.isfinite(sigma) and sigma > 0):
        raise UsageError(f"sampling starts at a noise level above 0, not at {sigma:g}")
    schedule = NoiseSchedule("flow" if scheduler == "flow" else "linear")
    time = schedule.time_of(_SPAN * sigma)
    times = (time * left / count for left in range(count - 1, 0, -1))
    # The first level is the measurement's own, and the last is exactly none.
    levels = [sigma, *(schedule.sigma_at(one) / _SPAN for one in times), 0.0]
    return [_step(scheduler, levels, index, eta) for index in range(count)]


def earlier_predictions(scheduler: SchedulerName, count: int) -> int:
    """Return how many earlier predictions steps need at most, of ``count`` steps.

    The first step has none, and the last one needs none.
    """
    return min(_EARLIER.get(scheduler, 0), max(count - 2, 0))


def _step(scheduler: SchedulerName, levels: list[float], index: int, eta: float) -> SamplingStep:
    now, after = levels[index : index + 2]
    if after == 0:
        return SamplingStep(index, now, after, kept=0.0)
    share = {"ddpm": 1.0, "ddim": eta}.get(scheduler, 0.0)
    drawn = share * after * math.sqrt(1 - (after / now) ** 2)
    kept = math.sqrt(after**2 - drawn**2) / now
    earlier: tuple[float, ...] = ()
    if scheduler in _EARLIER:
        earlier = _earlier_shares(levels, index, corrected=scheduler == "unipc")
    return SamplingStep(index, now, after, kept, earlier, drawn)


def _earlier_shares(levels: list[float], index: int, *, corrected: bool) -> tuple[float, ...]:
    """Return the shares of the earlier predictions in a step of second order.

    The predictor is that of DPM-Solver++ (2M, midpoint), and of UniPC too. The corrector changes
    the state by what the new prediction says about the step before; since the state before can be
    computed from this one, that is a change of the shares alone.
    """
    if index == 0:
        return ()
    now, after = levels[index : index + 2]
    last, kept = levels[index - 1], after / now
    length, last_length = math.log(now / after), math.log(last / now)
    slope = -0.5 * (1 - kept) * length / last_length
    if not corrected:
        return (slope,)
    moved = 1 - now / last
    if index == 1:  # a step of first order has a corrector of first order
        return (slope - 0.5 * kept * moved,)
    # φ-functions of the last step, and how the corrector weighs both differences (B(h) = eʰ - 1).
    first = 1 / moved - 1 / last_length
    second = (1 - 2 * (1 - moved / last_length) / last_length) / moved
    ratio = -math.log(levels[index - 2] / last) / last_length
    older = (first - second) / (1 - ratio)
    newer = kept * moved * (first - older)
    # The predictor had already given the older difference a half.
    older = kept * moved * (older - 0.5) / ratio
    return slope - newer - older, older


def row_noise(seed: int, sample: int, step: int, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 standard normal noise (N, W, C) for N rows from ``first`` on.

    A row's noise depends on the seed, the sample, the step and the row alone: it is the same for
    every band, batch and device.
    """
    rows = [
        philox_generator(seed, _PURPOSE + step, sample, row).standard_normal(shape[1:], np.float32)
        for row in range(first, first + shape[0])
    ]
    return np.stack(rows)
