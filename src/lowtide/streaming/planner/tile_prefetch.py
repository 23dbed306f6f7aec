"""What a plan takes when tiles of an image are on their way to a card while others are run."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.planner.ledger_rows import ledger_row
from lowtide.streaming.tiles.runner import plan_axes


def with_prefetch(plan: Plan, streams: int) -> Plan:
    """``plan`` with up to so many batches of tiles on their way to its card and back; as it is on
    the CPU, whose memory the host's is, and where there is one batch.

    Each has its own floats on the host and on the card; what the network takes in between is that
    of one, since a card runs them one after another.
    """
    rows, columns = plan_axes(plan)
    most = min(streams, len(rows.starts) * -(-len(columns.starts) // plan.batch))
    if plan.device == "cpu" or plan.tiles == 1 or most < 2:
        return plan
    ledger = []
    for one in plan.ledger:
        if one.name == "copy buffers":
            # Beside what is on its way there are the images as floats and as they were read.
            given = one.value // (1 + plan.scale**2) * 5 // 4
            beside = (most - 1) * one.value
            value, upper = most * (one.value + given), most * (one.upper + given)
            one = one.model_copy(update={"value": value, "upper": upper})
            ledger.append(ledger_row("tiles in flight", "device", beside, beside, "known"))
        ledger.append(one)
    return plan.model_copy(update={"in_flight": most, "ledger": tuple(ledger)})
