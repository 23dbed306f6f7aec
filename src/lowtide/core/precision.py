"""In what a model computes."""

from __future__ import annotations

from typing import Literal

# int8: linear layers in 8 bits, all else in fp32.
Precision = Literal["fp32", "bf16", "fp16", "int8"]
