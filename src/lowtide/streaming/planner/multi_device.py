"""What a plan takes when its tiles are run on several devices at once."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.runner import plan_axes

# Of a ledger: what each device, or each process' share of a processor, has for itself.
_ON_THE_CPU = {"live activations and scratch", "allocator", "margin"}
_BESIDE_CARDS = {"copy buffers"}


def on_several_devices(plan: Plan, devices: int) -> Plan:
    """``plan`` with the tiles of a row over up to so many devices; as it is if there is one.

    A card has its own memory; parts of a processor share what there is, and each has buffers of its
    own.
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
