"""Choice of a plan among the candidates of all strategies, by budget and time.

Strategies contribute candidates; none is known here by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lowtide.core.errors import BudgetError, UsageError
from lowtide.core.units import MIB, format_bytes, format_seconds
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Accuracy, ParetoPlan, Place, Plan, RefusedCandidate

# Accuracy that a user may request: only exact plans, exact ones where they fit, or the fastest.
AccuracyRequest = Literal["exact", "bounded", "fast"]

# A plan that takes twice the memory must save at least this share of the time.
_MIN_TIME_SAVED_PER_DOUBLING = 0.04
# Rows of the ledger that are derived from measurements of processes.
_PROCESS_ROWS = {"allocator", "runtime", "context", "margin"}


def choose_plan(
    candidates: Sequence[Plan],
    budget: Budget,
    accuracy: AccuracyRequest = "bounded",
    refused: Sequence[RefusedCandidate] = (),
) -> Plan:
    """Return the best candidate whose upper bounds fit ``budget``.

    Among the plans considered the fastest is taken, where twice the memory must save a few percent
    of the time.

    Args:
        accuracy: ``"exact"`` (only exact plans are considered), ``"bounded"`` (exact where that
            fits, else the plan with the fewest seams) or ``"fast"`` (the least time, exact or not).
        refused: strategies that contributed no candidate, with reasons, for the report.

    Raises:
        BudgetError: if nothing fits; names the smallest budget that any candidate would accept.
        UsageError: if an exact plan is wanted and there is none.
    """
    considered = accurate_enough(candidates, accuracy)
    if not considered:
        raise UsageError(
            f"no exact plan is possible: {_why(refused) or 'tiles differ from the whole image'}",
            hint="--accuracy bounded allows tiles, whose error is measured",
        )
    fitting = [plan for plan in considered if shortfall(plan, budget) is None]
    if not fitting:
        raise _nothing_fits(considered, candidates, budget, refused)
    exact = [plan for plan in fitting if plan.accuracy == "exact"]
    if accuracy == "fast":
        pool = fitting
    else:
        pool = exact or [
            min(fitting, key=lambda plan: (round(plan.strategy.seam_share, 2), plan.seconds))
        ]
    best = min(pool, key=_score)
    return best.model_copy(
        update={
            "budget_bytes": budget.device_bytes,
            "host_budget_bytes": budget.host_bytes,
            "choice": _explain(best, fitting, budget),
            "refused": (*_refusals(best, candidates, budget), *refused),
            "pareto_front": pareto_front(candidates, best),
        }
    )


def plans_below(plans: list[Plan], limit_bytes: int | None) -> list[Plan]:
    """Return the plans below ``limit_bytes`` bytes, or else the smallest plan."""
    if limit_bytes is None or not plans:
        return plans
    smallest = min(plans, key=lambda plan: plan.upper_bytes)
    return [plan for plan in plans if plan.upper_bytes < limit_bytes] or [smallest]


def accurate_enough(candidates: Sequence[Plan], accuracy: AccuracyRequest) -> list[Plan]:
    """Return the candidates whose accuracy satisfies the request ``accuracy``."""
    return [one for one in candidates if accuracy != "exact" or one.accuracy == "exact"]


def pareto_front(candidates: Sequence[Plan], chosen: Plan | None = None) -> tuple[ParetoPlan, ...]:
    """Return the Pareto front of memory and time among ``candidates``, smallest first.

    Accuracy counts too: a bounded plan does not dominate an exact one. ``chosen`` is listed even
    where it is dominated.
    """
    front: list[Plan] = []
    for plan in sorted(candidates, key=lambda plan: (plan.upper_bytes, plan.seconds)):
        beaten = any(
            other.seconds <= plan.seconds and _RANKS[other.accuracy] >= _RANKS[plan.accuracy]
            for other in front
        )
        if plan is chosen or not beaten:
            front.append(plan)
    return tuple(
        ParetoPlan(
            title=plan.title,
            accuracy=plan.accuracy,
            predicted_bytes=plan.predicted_bytes,
            upper_bytes=plan.upper_bytes,
            seconds=plan.seconds,
            chosen=plan is chosen,
        )
        for plan in front
    )


_RANKS: dict[Accuracy, int] = {"bounded": 0, "exact": 1}


def _score(plan: Plan) -> float:
    """Seconds, weighted by the memory that is known before the run.

    Rows measured in processes are excluded: they vary from run to run, and the choice would too.
    """
    known = sum(
        [row.value for row in plan.ledger if row.place != "disk" and row.name not in _PROCESS_ROWS]
    )
    return plan.seconds * (1 + _MIN_TIME_SAVED_PER_DOUBLING * math.log2(max(known / MIB, 1)))


def shortfall(plan: Plan, budget: Budget) -> str | None:
    """Return why ``plan`` does not fit ``budget``, or None if it fits."""
    limits: tuple[tuple[Place, int], ...] = (
        ("device", budget.device_bytes),
        ("host", budget.host_bytes),
        ("disk", budget.disk_bytes),
    )
    for place, limit in limits:
        need = plan.bytes_at(place, upper=True)
        if need > limit:
            where = {"device": "", "host": " of host memory", "disk": " of disk space"}[place]
            return f"needs up to {format_bytes(need)}{where}, {format_bytes(limit)} allowed"
    return None


def _explain(best: Plan, fitting: Sequence[Plan], budget: Budget) -> str:
    if len(fitting) == 1:
        why = "the only candidate considered that fits"
    elif best.accuracy == "exact":
        why = f"exact, and the best of {len(fitting)} candidates that fit"
    else:
        why = f"fewest seams of {len(fitting)} candidates that fit"
    return (
        f"{best.title}: {why} in {format_bytes(budget.device_bytes)}, "
        f"expects {format_bytes(best.predicted_bytes)} (at most {format_bytes(best.upper_bytes)}) "
        f"and {format_seconds(best.seconds)} of compute time"
    )


def _refusals(
    best: Plan, candidates: Sequence[Plan], budget: Budget
) -> tuple[RefusedCandidate, ...]:
    """Return the best plan of each other strategy, with the reason it was not chosen."""
    refused = []
    for strategy in dict.fromkeys(plan.strategy.name for plan in candidates):
        if strategy == best.strategy.name:
            continue
        rivals = [plan for plan in candidates if plan.strategy.name == strategy]
        able = [plan for plan in rivals if shortfall(plan, budget) is None]
        rival = (
            min(able, key=lambda p: p.seconds) if able else min(rivals, key=lambda p: p.upper_bytes)
        )
        reason = shortfall(rival, budget)
        if reason is None and best.accuracy != rival.accuracy:
            reason = f"only {rival.accuracy}"
        if reason is None:
            reason = (
                f"{format_seconds(rival.seconds)} and up to {format_bytes(rival.upper_bytes)}"
                f" against {format_seconds(best.seconds)} and {format_bytes(best.upper_bytes)}"
            )
        refused.append(RefusedCandidate(title=rival.title, reason=reason))
    return tuple(refused)


def _nothing_fits(
    considered: Sequence[Plan],
    candidates: Sequence[Plan],
    budget: Budget,
    refused: Sequence[RefusedCandidate],
) -> BudgetError:
    smallest = min(considered, key=lambda plan: plan.upper_bytes)
    # Rounded up to a whole MiB, so that the command in the hint works.
    need = -(-smallest.upper_bytes // MIB) * MIB
    if smallest.upper_bytes <= budget.device_bytes:
        reason = shortfall(smallest, budget)
        return BudgetError(
            f"no plan fits: {smallest.title} {reason}",
            hint="free some host memory or disk, or raise --host-budget or --disk-budget",
        )
    kind = "exact plan" if len(considered) < len(candidates) else "plan"
    others = any(shortfall(one, budget) is None for one in candidates)
    reasons = [one for one in (budget.note, _why(refused)) if one]
    because = f" ({'; '.join(reasons)})" if reasons else ""
    return BudgetError(
        f"no {kind} fits in {format_bytes(budget.device_bytes)}: the smallest, {smallest.title},"
        f" needs {format_bytes(need)} and {format_seconds(smallest.seconds)} of compute time"
        f"{because}",
        smallest=need,
        hint=budget.hint_for(need)
        + (", or --accuracy bounded for tiles with a measured error" if others else ""),
    )


def _why(refused: Sequence[RefusedCandidate]) -> str:
    return "; ".join(f"{one.title}: {one.reason}" for one in refused)
