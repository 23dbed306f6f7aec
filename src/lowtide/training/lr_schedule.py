"""Schedules by training step: learning rate, loss weights and EMA decay."""

from __future__ import annotations

import math

from lowtide.training.run_config import LossEntry, Scheduler


def lr_factor(scheduler: Scheduler, step: int, total: int, warmup: int) -> float:
    """Return the factor on the base learning rate in step ``step`` of ``total``.

    Steps count from 0. A linear warmup over ``warmup`` steps multiplies the scheduler's factor.
    """
    warmup_factor = min(1.0, (step + 1) / (warmup + 1))
    if scheduler.type == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        return warmup_factor * (scheduler.eta_min + (1 - scheduler.eta_min) * cosine)
    if scheduler.type == "multistep":
        passed = sum(step >= milestone for milestone in scheduler.milestones)
        return warmup_factor * scheduler.gamma**passed
    return warmup_factor


def loss_weight(entry: LossEntry, step: int) -> float:
    """Return a loss's weight in step ``step``: 0 before it starts, then a linear ramp."""
    since = step - entry.start_iter
    if since < 0:
        return 0.0
    return entry.loss_weight * min(1.0, (since + 1) / (entry.ramp_iter + 1))


def ema_decay(decay: float, warmup: int, step: int) -> float:
    """Return the EMA decay after step ``step``, counted from 0.

    It is smaller in the first steps, so that the average forgets the random initial weights.
    """
    return min(decay, (step + 1) / (step + 1 + warmup))
