"""Error of a result and tolerance for rounding, relative to its largest absolute value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_BY_TYPE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def tolerance(types: Iterable[torch.dtype]) -> float:
    """Return the tolerance of the coarsest dtype; whole numbers have none."""
    return max((_BY_TYPE[dtype] for dtype in set(types) if dtype in _BY_TYPE), default=0.0)


def relative_error(result: Tensor, whole: Tensor) -> float:
    """Return the largest difference, relative to the largest value of ``whole``.

    Infinite where it is NaN, or if the tensors do not have the same shape.
    """
    if result.shape != whole.shape:
        return float("inf")
    apart = (result.double() - whole.double()).abs().max().item()
    # Written so that a NaN difference counts as infinite.
    return apart / max(whole.double().abs().max().item(), 1e-30) if apart >= 0 else float("inf")


def largest_error(results: Iterable[Tensor], wholes: Iterable[Tensor]) -> float:
    """Return the largest `relative_error` of several results."""
    return max(relative_error(*pair) for pair in zip(results, wholes, strict=True))


def error_words(error: float) -> str:
    """Return a `relative_error` for a message, after "differs"."""
    return f"by {error:.1e} of its range" if error < 1 else "altogether"
