"""A plan is pure data: what will be run, what it will use, and why not otherwise.

Strategies contribute candidates, each priced as a ledger; `choose` knows none of them by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes, format_seconds
from lowtide.memory.budget import Budget
from lowtide.memory.ledger import LedgerRow, Place

Accuracy = Literal["exact", "bounded"]

# A doubling of memory has to buy this share of the time.
_DOUBLING_BUYS = 0.04


class Refusal(BaseModel):
    """A candidate that was not chosen, in one line."""

    model_config = ConfigDict(frozen=True)

    what: str
    reason: str


class Alternative(BaseModel):
    """A point of the front between memory and time: no candidate takes less of both."""

    model_config = ConfigDict(frozen=True)

    what: str
    accuracy: Accuracy
    predicted_bytes: int
    upper_bytes: int
    seconds: float
    chosen: bool = False


# What is tried in this order when memory runs out in spite of a plan.
Recovery = Literal["again", "smaller batch", "smaller tile", "smaller plan"]
RECOVERY: tuple[Recovery, ...] = ("again", "smaller batch", "smaller tile", "smaller plan")


class Plan(BaseModel):
    """How one image will be run. JSON in, JSON out; the same plan gives the same file.

    Sizes are input pixels. ``run_pixels`` is the most that the network gets at once, all
    ``images_per_tile`` (color and alpha) counted. ``upper_bytes`` is what is held against the
    budget. Tiles are all of one size, padded where the image ends, and run row by row, so that
    the first one shows what all of them take; ``recovery`` is what follows if memory runs out
    nevertheless. ``heap`` is what the C heap of the command line's process does with freed blocks;
    "as it is" leaves it alone. ``model_sha256`` names the weights that the figures are of.
    ``front`` are the candidates that nothing beats in both memory and time, from the smallest up.
    """

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    strategy: str
    accuracy: Accuracy
    device: str
    precision: Literal["fp32", "bf16", "fp16"]
    channels_last: bool
    width: int
    height: int
    padded_width: int
    padded_height: int
    scale: int
    align: int
    minimum: int = 0
    square: bool = False
    tile_width: int
    tile_height: int
    overlap: int
    blend: int
    batch: int
    tiles: int
    images_per_tile: int
    run_pixels: int
    seam_share: float
    seconds: float
    ledger: tuple[LedgerRow, ...]
    budget_bytes: int = 0
    host_budget_bytes: int = 0
    choice: str = ""
    refused: tuple[Refusal, ...] = ()
    front: tuple[Alternative, ...] = ()
    recovery: tuple[Recovery, ...] = RECOVERY
    heap: Literal["as it is", "keeps", "gives back"] = "as it is"
    model_sha256: str = ""

    def bytes_at(self, place: Place, *, upper: bool = False) -> int:
        """Sum of the ledger at one place; on the CPU the host is the device."""
        places = {"device", "host"} if self.device == "cpu" and place != "disk" else {place}
        return sum(
            row.upper if upper else row.value for row in self.ledger if row.place in places
        )

    @property
    def predicted_bytes(self) -> int:
        """Expected peak on the compute device."""
        return self.bytes_at("device")

    @property
    def upper_bytes(self) -> int:
        """Upper bound of the peak on the compute device."""
        return self.bytes_at("device", upper=True)

    @property
    def title(self) -> str:
        """For people: the strategy with its sizes."""
        thrifty = ", memory given back at once" if self.heap == "gives back" else ""
        if self.tiles == 1:
            return f"{self.strategy} {self.width}×{self.height}{thrifty}"
        batch = f", {self.batch} at a time" if self.batch > 1 else ""
        return (
            f"{self.strategy} {self.tile_width}×{self.tile_height}"
            f" overlap {self.overlap} ({self.tiles} tiles{batch}){thrifty}"
        )


def choose(candidates: Sequence[Plan], budget: Budget) -> Plan:
    """The candidate that fits and serves best: exact first, fewest seams, then time,
    where a doubling of memory must buy a few percent of it.

    Raises `BudgetError` naming the smallest budget that any candidate would accept.
    """
    fitting = [plan for plan in candidates if _shortfall(plan, budget) is None]
    if not fitting:
        raise _nothing_fits(candidates, budget)
    exact = [plan for plan in fitting if plan.accuracy == "exact"]
    pool = exact or [min(fitting, key=lambda plan: (round(plan.seam_share, 2), plan.seconds))]
    best = min(pool, key=_score)
    return best.model_copy(
        update={
            "budget_bytes": budget.device_bytes,
            "host_budget_bytes": budget.host_bytes,
            "choice": _explain(best, fitting, budget),
            "refused": _refusals(best, candidates, budget),
            "front": frontier(candidates, best),
        }
    )


def frontier(candidates: Sequence[Plan], chosen: Plan | None = None) -> tuple[Alternative, ...]:
    """The candidates that no other beats in memory without losing in time, smallest first.

    Accuracy counts too: an exact plan is not beaten by one that is only bounded. ``chosen`` is
    listed even where others are as good.
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
        Alternative(
            what=plan.title, accuracy=plan.accuracy, predicted_bytes=plan.predicted_bytes,
            upper_bytes=plan.upper_bytes, seconds=plan.seconds, chosen=plan is chosen,
        )
        for plan in front
    )  # fmt: skip


_RANKS: dict[Accuracy, int] = {"bounded": 0, "exact": 1}


def _score(plan: Plan) -> float:
    return plan.seconds * (1 + _DOUBLING_BUYS * math.log2(max(plan.upper_bytes / MIB, 1)))


def _shortfall(plan: Plan, budget: Budget) -> str | None:
    """Why the plan does not fit, or None if it does."""
    limits: tuple[tuple[Place, int], ...] = (
        ("device", budget.device_bytes), ("host", budget.host_bytes), ("disk", budget.disk_bytes),
    )  # fmt: skip
    for place, limit in limits:
        need = plan.bytes_at(place, upper=True)
        if need > limit:
            where = "" if place == "device" else f" of {place} memory"
            return f"needs up to {format_bytes(need)}{where}, {format_bytes(limit)} allowed"
    return None


def _explain(best: Plan, fitting: Sequence[Plan], budget: Budget) -> str:
    if len(fitting) == 1:
        why = "the only candidate that fits"
    elif best.accuracy == "exact":
        why = f"exact, and the best of {len(fitting)} candidates that fit"
    else:
        why = f"fewest seams of {len(fitting)} candidates that fit"
    return (
        f"{best.title}: {why} in {format_bytes(budget.device_bytes)}, "
        f"expects {format_bytes(best.predicted_bytes)} (at most {format_bytes(best.upper_bytes)}) "
        f"and {format_seconds(best.seconds)} of computing"
    )


def _refusals(best: Plan, candidates: Sequence[Plan], budget: Budget) -> tuple[Refusal, ...]:
    """The best of each other strategy, with the reason it lost."""
    refused = []
    for strategy in dict.fromkeys(plan.strategy for plan in candidates):
        if strategy == best.strategy:
            continue
        rivals = [plan for plan in candidates if plan.strategy == strategy]
        able = [plan for plan in rivals if _shortfall(plan, budget) is None]
        rival = min(able, key=lambda p: p.seconds) if able else min(
            rivals, key=lambda p: p.upper_bytes
        )
        reason = _shortfall(rival, budget)
        if reason is None and best.accuracy != rival.accuracy:
            reason = f"only {rival.accuracy}"
        if reason is None:
            reason = (
                f"{format_seconds(rival.seconds)} and up to {format_bytes(rival.upper_bytes)}"
                f" against {format_seconds(best.seconds)} and {format_bytes(best.upper_bytes)}"
            )
        refused.append(Refusal(what=rival.title, reason=reason))
    return tuple(refused)


def _nothing_fits(candidates: Sequence[Plan], budget: Budget) -> BudgetError:
    smallest = min(candidates, key=lambda plan: plan.upper_bytes)
    # Rounded up to a whole MiB, so that the hinted command is one that works.
    need = -(-smallest.upper_bytes // MIB) * MIB
    if smallest.upper_bytes <= budget.device_bytes:
        reason = _shortfall(smallest, budget)
        return BudgetError(
            f"no plan fits: {smallest.title} {reason}",
            smallest=need,
            hint="free some host memory or disk, or raise --host-budget or --disk-budget",
        )
    return BudgetError(
        f"no plan fits in {format_bytes(budget.device_bytes)}: the smallest, {smallest.title},"
        f" needs {format_bytes(need)} and {format_seconds(smallest.seconds)} of computing",
        smallest=need,
        hint=f"--budget {need // MIB}MiB",
    )
