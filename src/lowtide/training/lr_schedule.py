"""Numbers that change with the step: the learning rate, a loss's weight, the average's decay."""

from __future__ import annotations

import math

from lowtide.training.train_config import LossEntry, Scheduler


def lr_factor(scheduler: Scheduler, step: int, total: int, warmup: int) -> float:
    """Share of the learning rate in step ``step``, counted from 0, of ``total``.

    Rises in a line over ``warmup`` steps, on top of what the scheduler says.
    """
    rising = min(1.0, (step + 1) / (warmup + 1))
    if scheduler.type == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        return rising * (scheduler.eta_min + (1 - scheduler.eta_min) * cosine)
    if scheduler.type == "multistep":
        passed = sum(step >= milestone for milestone in scheduler.milestones)
        return rising * scheduler.gamma**passed
    return rising


def loss_weight(entry: LossEntry, step: int) -> float:
    """What a loss is multiplied by in step ``step``: 0 before it starts, then up in a line."""
    since = step - entry.start_iter
    if since < 0:
        return 0.0
    return entry.loss_weight * min(1.0, (since + 1) / (entry.ramp_iter + 1))


def ema_decay(decay: float, warmup: int, step: int) -> float:
    """How much of the average stays after step ``step``, counted from 0: less in the beginning,
    so that it forgets the random weights."""
    return min(decay, (step + 1) / (step + 1 + warmup))
