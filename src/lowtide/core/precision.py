"""Compute precisions of a model."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
