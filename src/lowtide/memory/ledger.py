"""Ledger rows: the itemized memory of every estimate, plan and report."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Place = Literal["device", "host", "disk"]
Origin = Literal["known", "traced", "probed", "simulated", "prior", "calibrated", "measured"]


# A quarter of a model's own memory: the report of a folder keeps tens of rows for each file.
@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class LedgerRow:
    """One item of memory: expected bytes, upper bound, place and origin of the figure."""

    name: str
    place: Place
    value: int
    upper: int
    origin: Origin


def device_row(name: str, value: int, origin: Origin, upper: int | None = None) -> LedgerRow:
    """Return a row of the device; its upper bound is ``value``, or more if given."""
    upper = value if upper is None else max(value, upper)
    return LedgerRow(name=name, place="device", value=value, upper=upper, origin=origin)
