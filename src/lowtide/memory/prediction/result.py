"""Result of a memory prediction: the ledger rows and where the peak occurs."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.memory.ledger import LedgerRow, device_row
from lowtide.memory.prediction.heap_growth import HeapUse
from lowtide.memory.prediction.runtime_objects import RuntimeObjects
from lowtide.memory.tracing.trace import KIND_TITLES, KINDS, Trace


@dataclass(frozen=True)
class PredictedMemory:
    """Ledger of a predicted run, with the phase and the operator of its peak.

    ``live_bytes`` is the peak of live tensors.
    """

    rows: tuple[LedgerRow, ...]
    phase: str
    operator: str
    live_bytes: int
    notes: tuple[str, ...] = ()
    objects: RuntimeObjects | None = None
    heap_use: HeapUse | None = None


def live_tensor_rows(trace: Trace, op: int | None) -> list[LedgerRow]:
    """Return the live tensor bytes by kind as ledger rows.

    They are those while operator ``op`` runs; None means at the peak of live bytes.
    """
    kinds = trace.live_at_peak() if op is None else trace.live_during(op)
    return [device_row(KIND_TITLES[kind], kinds[kind], "traced") for kind in KINDS if kinds[kind]]


def margin_row(rows: list[LedgerRow], upper: int) -> LedgerRow:
    """Return the ledger row that raises the upper total to ``upper`` bytes.

    Its expected value is 0: it allows for what past runs took beyond their predictions.
    """
    allowed = upper - sum(row.upper for row in rows)
    return device_row("margin", 0, "calibrated", allowed)
