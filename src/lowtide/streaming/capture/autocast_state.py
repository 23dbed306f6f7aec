"""Snapshot of the autocast state, to compare and to restore."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Autocast state for one device type, ``kind``: enabled or not, and its dtype."""

    kind: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> AutocastState:
        """Return the autocast state of the current thread."""
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return cls(kind, False, None)
        return cls(kind, True, torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[object]:
        """Return a context manager that restores this state."""
        if not self.enabled:
            return no_autocast(self.kind)
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.enabled)


def no_autocast(kind: str) -> AbstractContextManager[object]:
    """Return a context manager in which autocast is off."""
    known = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if known else nullcontext()
