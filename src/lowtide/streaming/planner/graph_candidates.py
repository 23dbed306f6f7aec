"""What a plan takes when its network is recorded as a CUDA graph."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.planner.ledger_rows import LIVE_ROW, ledger_row

# A graph holds what a run takes, what the allocator keeps for it included, in memory that no other
# run may use: beside it are the run that it is compared with, and tiles of other shapes. Blocks are
# rounded up.
_UPPER = 1.3
# Three runs, the recording and the comparison.
_RUNS = 6


def with_cuda_graph(plan: Plan, images: int) -> Plan:
    """``plan`` recorded, which ``images`` of one size wait for once."""
    taken = sum(one.value for one in plan.ledger if one.name in (LIVE_ROW, "allocator"))
    passes = plan.tiles / plan.batch
    return plan.model_copy(
        update={
            "recorded": True,
            "seconds": plan.seconds * (1 + _RUNS / passes / images),
            "ledger": (
                *plan.ledger,
                ledger_row("CUDA graph", "device", taken, taken * _UPPER, "prior"),
            ),
        }
    )
