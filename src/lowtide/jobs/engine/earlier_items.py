"""What earlier items of a job leave to the next one: memory still held, and bounds that failed.

A folder's tenth picture does not start with an empty heap.
"""

from __future__ import annotations

from lowtide.core.units import format_bytes
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.meter import CudaMeter, HostMeter


class EarlierItems:
    """Memory that the items of a job have to be planned with, in addition to their own.

    The process keeps some memory from item to item: compiled kernels, captured programs, and pages
    of the heap with a small block in them. A run above its own bound shows that the bounds of this
    job are too low, by that much.
    """

    def __init__(self, meter: HostMeter | CudaMeter) -> None:
        self._meter = meter
        self._at_first: int | None = None
        self._held_bytes = self._over_bytes = 0

    @property
    def upper_bytes(self) -> int:
        """Bytes that the bound of the next item has to leave free."""
        return self._held_bytes + self._over_bytes

    def measure(self, others_bytes: int) -> None:
        """Measure what is held before a run beyond what was before the first one.

        ``others_bytes`` are those of items in flight. To be called after the heap was trimmed.
        """
        held = self._meter.current_bytes - others_bytes
        if self._at_first is None:
            self._at_first = held
        self._held_bytes = max(0, held - self._at_first)

    def add_excess(self, over_bytes: int) -> str:
        """Widen the bounds of later items by ``over_bytes``; return an event that says so."""
        self._over_bytes += over_bytes
        return f"over at most by {format_bytes(over_bytes)}: later items are planned with that"

    def rows(self) -> list[LedgerRow]:
        """Return what there is as rows of the next item's ledger."""
        held, over = self._held_bytes, self._over_bytes
        rows = [
            ("held before the run", held, held),
            ("excess of earlier runs", 0, over),
        ]
        return [
            LedgerRow(name=name, place="device", value=value, upper=upper, origin="measured")
            for name, value, upper in rows
            if upper
        ]
