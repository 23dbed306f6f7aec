"""In what a model computes."""

from __future__ import annotations

from typing import Literal, TypeGuard

# Linear layers in 8 bits: whole numbers, and all else in fp32; or e4m3, and all else in bf16.
EightBits = Literal["int8", "fp8"]
Precision = Literal["fp32", "bf16", "fp16"] | EightBits


def is_eight_bits(precision: str) -> TypeGuard[EightBits]:
    """Whether linear layers compute in 8 bits."""
    return precision in ("int8", "fp8")
