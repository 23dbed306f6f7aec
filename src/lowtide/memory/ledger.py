"""Ledger rows: the itemized memory of every estimate, plan and report."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Place = Literal["device", "host", "disk"]
Origin = Literal["known", "traced", "probed", "simulated", "prior", "calibrated", "measured"]


class LedgerRow(BaseModel):
    """One item of memory: expected bytes, upper bound, place and origin of the figure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    place: Place
    value: int
    upper: int
    origin: Origin


def device_row(name: str, value: int, origin: Origin, upper: int | None = None) -> LedgerRow:
    """Return a row of the device; its upper bound is ``value``, or more if given."""
    upper = value if upper is None else max(value, upper)
    return LedgerRow(name=name, place="device", value=value, upper=upper, origin=origin)
