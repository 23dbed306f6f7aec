"""Pinned state of a folder's first run, by which a resumed run makes equal files.

Measured costs and free memory differ a little each time; with the pinned ones a resumed file is
planned, and so made, as in an undisturbed run. A pin is valid as long as the versions of all that
computes are the same.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, ValidationError

from lowtide.jobs.journal import Journal
from lowtide.jobs.prepared import Measurements
from lowtide.memory.budget import Budget


class Pin(BaseModel):
    """Budget and measurements that a folder's first run had."""

    model_config = ConfigDict(extra="forbid")  # a pin with other names counts as damaged

    device: str
    device_bytes: int
    host_bytes: int
    versions: dict[str, str]
    measured: Measurements

    @classmethod
    def read(cls, journal: Journal | None, versions: dict[str, str]) -> Pin | None:
        """Return the pin of a folder's journal, or None where all has to be measured."""
        pin = journal.pin if journal is not None else {}
        if pin.get("versions") != versions:
            return None
        try:
            return cls.model_validate(pin)
        except ValidationError:  # a damaged pin counts as one of other versions
            return None

    @classmethod
    def write(
        cls,
        journal: Journal | None,
        versions: dict[str, str],
        budget: Budget,
        measured: Measurements,
    ) -> None:
        """Pin this run's state for a run that resumes the folder."""
        if journal is None:
            return
        pin = cls(
            device=budget.device,
            device_bytes=budget.device_bytes,
            host_bytes=budget.host_bytes,
            versions=versions,
            measured=measured,
        )
        journal.set_pin(pin.model_dump(mode="json"))

    def pinned_budget(self, requested: str | int | Budget, budget: Budget) -> Budget:
        """Return ``budget``, or the first run's if ``requested`` follows free memory."""
        follows = isinstance(requested, str) and (requested == "auto" or requested.endswith("%"))
        if not follows or self.device != budget.device:
            return budget
        return replace(budget, device_bytes=self.device_bytes, host_bytes=self.host_bytes)
