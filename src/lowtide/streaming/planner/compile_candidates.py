"""Price of a plan whose network is compiled by `torch.compile` first."""

from __future__ import annotations

from lowtide.core.units import MIB
from lowtide.memory.plan import Plan
from lowtide.streaming.planner.ledger_rows import ledger_row
from lowtide.streaming.specialize.shape_specialized import SpecializationGain

# Assumed until a run has measured it: light networks took a quarter of a minute and 70 MiB
# (benchmarks/results/compiled.json), larger ones take more.
_ASSUMED_GAIN = SpecializationGain(ratio=1.0, warmup_seconds=30.0)
_USUAL_BYTES, _UPPER = 150 * MIB, 1.5


def with_compile(plan: Plan, gain: SpecializationGain | None, images: int) -> Plan:
    """Return ``plan`` with a compiled network.

    ``images`` of one size share the compile time.
    """
    known = gain or _ASSUMED_GAIN
    value = known.host_bytes or _USUAL_BYTES
    origin = "measured" if known.host_bytes else "prior"
    return plan.model_copy(
        update={
            "compiled": True,
            "seconds": plan.seconds * known.ratio + known.warmup_seconds / images,
            "ledger": (*plan.ledger, ledger_row("compiler", "host", value, value * _UPPER, origin)),
        }
    )
