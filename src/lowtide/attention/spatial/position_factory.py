"""Factory of relative position encodings by name."""

from __future__ import annotations

from typing import Literal

from lowtide.attention.spatial.position import DecomposedBias, Position, TableBias
from lowtide.attention.spatial.rope import Rope2d
from lowtide.core.errors import UsageError

PositionKind = Literal["none", "table", "decomposed", "rope"]


def make_position(kind: PositionKind, heads: int, head_dim: int, max_distance: int) -> Position:
    """Create a relative position encoding by name.

    ``max_distance`` is the greatest distance in pixels along an axis, for the biases.

    Raises:
        UsageError: the name is unknown.
    """
    if kind == "none":
        return Position()
    if kind == "rope":
        return Rope2d(head_dim)
    if kind == "table":
        return TableBias(heads, max_distance)
    if kind == "decomposed":
        return DecomposedBias(heads, max_distance)
    raise UsageError(f"position {kind!r} is not known", hint="none, table, decomposed or rope")
