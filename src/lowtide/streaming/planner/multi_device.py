"""Price of a plan whose tiles run on several devices at once."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.grid import plan_axes

# Ledger rows that each device, or each process's share of a CPU, has for itself.
_CPU_ROWS_PER_DEVICE = {"live activations and workspace", "allocator", "margin"}
_GPU_ROWS_PER_DEVICE = {"copy buffers"}


def with_devices(plan: Plan, devices: int) -> Plan:
    """Return ``plan`` with the tiles of a row spread over up to ``devices`` devices.

    Unchanged if there is one device. Each GPU has its own memory; parts of a CPU share memory, and
    each has its own buffers.
    """
    _, columns = plan_axes(plan)
    groups = -(-len(columns.starts) // plan.batch)
    used = min(devices, groups)
    if used < 2 or plan.tiles == 1:
        return plan
    repeated = _CPU_ROWS_PER_DEVICE if plan.device == "cpu" else _GPU_ROWS_PER_DEVICE
    rows = tuple(
        row.model_copy(update={"value": row.value * used, "upper": row.upper * used})
        if row.name in repeated
        else row
        for row in plan.ledger
    )
    share = -(-groups // used) / groups
    return plan.model_copy(
        update={
            "device_count": used,
            "ledger": rows,
            "seconds": plan.seconds * share,
        }
    )
