"""Compute precisions of a model."""

from __future__ import annotations

from typing import Literal, TypeGuard

# Linear layers in 8 bits: int8, and everything else in fp32; or e4m3, and everything else in bf16.
EightBits = Literal["int8", "fp8"]
Precision = Literal["fp32", "bf16", "fp16"] | EightBits


def is_eight_bits(precision: str) -> TypeGuard[EightBits]:
    """Return whether linear layers compute in 8 bits."""
    return precision in ("int8", "fp8")
