"""The kinds of position by name."""

from __future__ import annotations

from typing import Literal

from lowtide.attention.spatial.position import DecomposedBias, Position, TableBias
from lowtide.attention.spatial.rope import Rope2d
from lowtide.core.errors import UsageError

PositionKind = Literal["none", "table", "decomposed", "rope"]


def make_position(kind: PositionKind, heads: int, head_dim: int, farthest: int) -> Position:
    """The module for a kind of position. Raises `UsageError` for one that is not known."""
    if kind == "none":
        return Position()
    if kind == "rope":
        return Rope2d(head_dim)
    if kind == "table":
        return TableBias(heads, farthest)
    if kind == "decomposed":
        return DecomposedBias(heads, farthest)
    raise UsageError(f"position {kind!r} is not known", hint="none, table, decomposed or rope")
