"""Backend for the package flash-attn, version 2 (Dao, arXiv 2307.08691)."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from lowtide.attention.backends.backend import Backend, Missing
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

_NEEDS = "flash-attn 2, an NVIDIA GPU (Ampere or newer), and nvcc with a C++ compiler to build it"


class Flash2(Backend):
    """Attention by ``flash_attn_func``, whose layout is (B, N, heads, head dim)."""

    name = "flash2"
    about = "the package flash-attn: fp16 and bf16, no mask"

    def missing_requirement(self, device: AttentionDevice) -> Missing | None:
        """Require the package and an NVIDIA GPU of compute capability 8.0 or more."""
        if importlib.util.find_spec("flash_attn") is None:
            return Missing(f"not installed; needs {_NEEDS}", "pip install lowtide[flash]")
        if device.kind != "cuda" or device.capability < (8, 0):
            return Missing("needs an NVIDIA GPU of compute capability 8.0 or more")
        return None

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Refuse masks, head dims over 256 and dtypes other than fp16 and bf16.

        Causal attention with unequal numbers of tokens as well, since the package aligns them by
        the last key.
        """
        rules = (
            ("there is a mask", call.has_mask),
            ("the dtype is not fp16 or bf16", call.dtype not in (torch.float16, torch.bfloat16)),
            ("query and value differ in head dimension", call.head_dim != call.value_dim),
            ("the head dimension is over 256", call.head_dim > 256),
            ("the head dimension is not a multiple of 8", call.head_dim % 8 != 0),
            (
                "causal with unequal numbers of tokens",
                call.is_causal and call.query_tokens != call.key_tokens,
            ),
        )
        return next((reason for reason, refused in rules if refused), None)

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count the log-sum-exp of each query."""
        return 4 * call.batch * call.heads * call.query_tokens

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention, (B, heads, queries, head dim), through transposed views."""
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        views = (tensor.transpose(1, 2) for tensor in (query, key, value))
        result = flash_attn_func(
            *views, dropout_p=spec.dropout, softmax_scale=spec.scale, causal=spec.causal
        )
        return result.transpose(1, 2)
