"""What pricing a run gives: its ledger, and where its peak is."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.memory.ledger import LedgerRow
from lowtide.memory.prediction.runtime_objects import RuntimeObjects
from lowtide.memory.tracing.trace import KINDS, TITLES, Trace


@dataclass(frozen=True)
class PredictedMemory:
    """A ledger with the phase and the operator of the peak, and the bytes of a ``piece`` of memory
    that is taken and given back before the run, which is told with it."""

    rows: tuple[LedgerRow, ...]
    phase: str
    operator: str
    live_bytes: int
    notes: tuple[str, ...] = ()
    objects: RuntimeObjects | None = None
    piece: int = 0


def live_tensor_rows(trace: Trace, op: int | None) -> list[LedgerRow]:
    """What tensors hold while operator ``op`` runs, or at the peak of live bytes, by kind."""
    kinds = trace.at_peak() if op is None else trace.during(op)
    return [
        LedgerRow(
            name=TITLES[kind],
            place="device",
            value=kinds[kind],
            upper=kinds[kind],
            origin="traced",
        )
        for kind in KINDS
        if kinds[kind]
    ]


def margin_row(rows: list[LedgerRow], upper: int) -> LedgerRow:
    """What past runs took beyond their predictions: nothing expected, but allowed for."""
    allowed = upper - sum(row.upper for row in rows)
    return LedgerRow(
        name="margin", place="device", value=0, upper=max(0, allowed), origin="calibrated"
    )
