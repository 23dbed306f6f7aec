"""Rules by operator name: how each operator computes a band of rows."""

from __future__ import annotations

from lowtide.streaming.rules import (
    conv,
    fuse_upsample_conv,
    indexing,
    matmul,
    norm,
    opaque,
    pointwise,
    reduce,
    resample,
    reshape,
)
from lowtide.streaming.rules.rule import LoweringContext, Rule, RuleResult

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **reshape.RULES,
    **indexing.RULES,
    **resample.RULES,
    **conv.RULES,
    **fuse_upsample_conv.RULES,
    **matmul.RULES,
    **norm.RULES,
    **reduce.RULES,
    **opaque.RULES,
}

__all__ = ["RULES", "LoweringContext", "Rule", "RuleResult"]
