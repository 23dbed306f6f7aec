"""Rules that tell how each operator treats rows: one file for each kind of operator."""

from __future__ import annotations

from lowtide.streaming.bands.rules import (
    contractions,
    doubled,
    moves,
    norms,
    opaque,
    pointwise,
    pools,
    reductions,
    resampling,
    shapes,
    stencils,
)
from lowtide.streaming.bands.rules.rule import Found, Rule, Tracked

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **shapes.RULES,
    **moves.RULES,
    **resampling.RULES,
    **stencils.RULES,
    **doubled.RULES,
    **pools.RULES,
    **contractions.RULES,
    **norms.RULES,
    **reductions.RULES,
    **opaque.RULES,
}

__all__ = ["RULES", "Found", "Rule", "Tracked"]
