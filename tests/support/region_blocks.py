"""Memory to allocate, and the rows that report it."""

import torch

from lowtide.core.units import MIB


def block(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


def values(rows) -> dict[str, int]:
    assert all(row.origin == "measured" and row.upper >= row.value for row in rows)
    return {row.name: row.value for row in rows}
