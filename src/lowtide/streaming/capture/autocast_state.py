"""Snapshot of the autocast state, to compare and to restore."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Autocast state for one device type, ``device_type``: enabled or not, and its dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> AutocastState:
        """Return the autocast state of the current thread."""
        if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(
            device_type
        ):
            return cls(device_type, False, None)
        return cls(device_type, True, torch.get_autocast_dtype(device_type))

    def restore(self) -> AbstractContextManager[object]:
        """Return a context manager that restores this state."""
        if not self.enabled:
            return no_autocast(self.device_type)
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context manager in which autocast is off."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()
