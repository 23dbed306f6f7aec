"""The rows in which every estimate, plan and report states its memory."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Place = Literal["device", "host", "disk"]
Origin = Literal["known", "traced", "probed", "simulated", "prior", "calibrated", "measured"]


class LedgerRow(BaseModel):
    """One use of memory: the expected bytes, an upper bound, and where the figure comes from."""

    model_config = ConfigDict(frozen=True)

    name: str
    place: Place
    value: int
    upper: int
    origin: Origin
