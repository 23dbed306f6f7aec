"""Price of a plan whose tiles run on several devices at once."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.runner import plan_axes

# Ledger rows that each device, or each process's share of a CPU, has for itself.
_ON_THE_CPU = {"live activations and scratch", "allocator", "margin"}
_BESIDE_CARDS = {"copy buffers"}


def on_several_devices(plan: Plan, devices: int) -> Plan:
    """Return ``plan`` with the tiles of a row spread over up to ``devices`` devices.

    Unchanged if there is one device. Each GPU has its own memory; parts of a CPU share memory, and
    each has its own buffers.
    """
    _, columns = plan_axes(plan)
    groups = -(-len(columns.starts) // plan.batch)
    lanes = min(devices, groups)
    if lanes < 2 or plan.tiles == 1:
        return plan
    repeated = _ON_THE_CPU if plan.device == "cpu" else _BESIDE_CARDS
    rows = tuple(
        row.model_copy(update={"value": row.value * lanes, "upper": row.upper * lanes})
        if row.name in repeated
        else row
        for row in plan.ledger
    )
    share = -(-groups // lanes) / groups
    return plan.model_copy(
        update={
            "lanes": lanes,
            "ledger": rows,
            "seconds": plan.seconds * share,
        }
    )
