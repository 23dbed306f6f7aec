"""How long runs of a model take on this machine, beside what their work was predicted to take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import Plan
from lowtide.memory.plan_store import JsonCache, machine_facts

# Seconds of a run below which files and Python take most of its time.
_LEAST_SECONDS = 0.1


@contextlib.contextmanager
def time_run_of_plan(costs: ModelCosts, plan: Plan) -> Iterator[None]:
    """Keep how long a run of ``plan`` takes beside what its work was predicted to take.

    Only for a model that was not timed before it ran. The longest run of a model counts.
    """
    started = time.process_time()
    yield
    seconds = (time.process_time() - started) / costs.threads
    if costs.points or seconds < _LEAST_SECONDS:
        return
    facts = _clock_facts(costs)
    known = JsonCache().get("clock", *facts)
    if known is None or seconds > 2 * known["seconds"]:
        ratio = costs.clock_ratio * seconds / plan.seconds
        JsonCache().put("clock", *facts, value={"ratio": ratio, "seconds": seconds})


def with_clock_ratio(costs: ModelCosts) -> ModelCosts:
    """Return costs whose seconds are those of this machine, as far as it ran the model before."""
    if costs.points:
        return costs
    known = JsonCache().get("clock", *_clock_facts(costs))
    if known is not None:
        return costs.model_copy(update={"clock_ratio": known["ratio"]})
    if costs.precision == "fp32":
        return costs
    from lowtide.memory.cpu_half_precision import expected_slowdown

    return costs.model_copy(update={"clock_ratio": expected_slowdown(costs.precision)})


def _clock_facts(costs: ModelCosts) -> tuple[object, ...]:
    return costs.sha256, costs.precision, *machine_facts()
