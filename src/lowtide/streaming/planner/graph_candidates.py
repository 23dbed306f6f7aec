"""Price of a plan whose network is replayed as a CUDA graph."""

from __future__ import annotations

from lowtide.memory.plan import Plan
from lowtide.streaming.planner.ledger_rows import LIVE_ROW, ledger_row

# A CUDA graph keeps the memory of a run, allocator overhead included, in a private pool. In
# addition there are the eager run that it is compared with, and tiles of other shapes. Blocks are
# rounded up.
_UPPER = 1.3
# Three warm-up runs, the capture and the comparison.
_CAPTURE_RUNS = 6


def with_cuda_graph(plan: Plan, images: int) -> Plan:
    """Return ``plan`` with its network replayed as a CUDA graph.

    ``images`` of one size share the capture time.
    """
    taken = sum(one.value for one in plan.ledger if one.name in (LIVE_ROW, "allocator"))
    passes = plan.tiles / plan.batch
    return plan.model_copy(
        update={
            "cuda_graph": True,
            "seconds": plan.seconds * (1 + _CAPTURE_RUNS / passes / images),
            "ledger": (
                *plan.ledger,
                ledger_row("CUDA graph", "device", taken, taken * _UPPER, "prior"),
            ),
        }
    )
