"""Price of a plan that prefetches tiles to a GPU while others run."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.planner.ledger_rows import ledger_row
from lowtide.streaming.tiles.grid import plan_axes


def with_prefetch(plan: Plan, streams: int) -> Plan:
    """Return ``plan`` with up to ``streams`` batches of tiles in flight.

    In flight: copied to the GPU or back. Unchanged on the CPU, which shares the host's memory, and
    where there is one batch. Each batch has its own float32 buffers on host and GPU; the network's
    activations count once, since a GPU runs batches one after another.
    """
    rows, columns = plan_axes(plan)
    most = min(streams, len(rows.starts) * -(-len(columns.starts) // plan.batch))
    if plan.device == "cpu" or plan.tiles == 1 or most < 2:
        return plan
    ledger = []
    for one in plan.ledger:
        if one.name == "copy buffers":
            # In addition to what is in flight, images are held in float32 and in the file's dtype.
            given = one.value // (1 + plan.scale**2) * 5 // 4
            extra = (most - 1) * one.value
            value, upper = most * (one.value + given), most * (one.upper + given)
            one = one.model_copy(update={"value": value, "upper": upper})
            ledger.append(ledger_row("tiles in flight", "device", extra, extra, "known"))
        ledger.append(one)
    return plan.model_copy(update={"in_flight": most, "ledger": tuple(ledger)})
