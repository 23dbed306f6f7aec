"""Autocast as it is at one moment, to compare it and to have it again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """Whether operators on this ``kind`` of device are given other types, and which."""

    kind: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> AutocastState:
        """That of this thread."""
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return cls(kind, False, None)
        return cls(kind, True, torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[object]:
        """A context with the same."""
        if not self.enabled:
            return no_autocast(self.kind)
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.enabled)


def no_autocast(kind: str) -> AbstractContextManager[object]:
    """A context in which operators compute in the types that they are given."""
    known = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if known else nullcontext()
