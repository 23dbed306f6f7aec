"""Tolerance for rounding, relative to the largest absolute value of a result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_BY_TYPE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def tolerance(types: Iterable[torch.dtype]) -> float:
    """Return the tolerance of the coarsest dtype; whole numbers have none."""
    return max((_BY_TYPE[dtype] for dtype in set(types) if dtype in _BY_TYPE), default=0.0)
