"""Backend for the package sageattention: 8-bit scores, inference only.

The registry has version 1 (Zhang et al., arXiv 2410.02367). Version 2 (arXiv 2411.10958) is
installed from its sources and has the same function name.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from torch import Tensor

from lowtide.attention.backends.backend import Backend, Missing, scale_of
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

_ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))


class Sage(Backend):
    """Quantized attention by ``sageattn``.

    Its results differ from exact attention by the rounding of scores to 8 bits.
    """

    name = "sage"
    about = "the package sageattention: 8-bit scores, inference only"

    def missing_requirement(self, device: AttentionDevice) -> Missing | None:
        """Require the package and a supported NVIDIA compute capability."""
        if importlib.util.find_spec("sageattention") is None:
            return Missing(
                "not installed; needs Triton and an NVIDIA GPU, Ampere or newer (PyPI has"
                " version 1; version 2 is built from its sources with nvcc)",
                "pip install lowtide[sage]",
            )
        if device.kind != "cuda" or device.capability not in _ARCHITECTURES:
            names = ", ".join(f"{major}.{minor}" for major, minor in _ARCHITECTURES)
            return Missing(f"needs an NVIDIA GPU of compute capability {names}")
        return None

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Refuse gradients (which would silently be zero), masks and dropout."""
        widths = (64, 96, 128) if _version() < 2 else tuple(range(1, 129))
        rules = (
            ("it has no backward pass", call.needs_grad),
            ("it ignores masks", call.has_mask),
            ("there is dropout", call.dropout > 0),
            ("the dtype is not fp16 or bf16", call.dtype not in (torch.float16, torch.bfloat16)),
            ("query and value differ in head dimension", call.head_dim != call.value_dim),
            (f"the head dimension is {call.head_dim}", call.head_dim not in widths),
            ("the last dimension is not contiguous", not call.has_unit_stride),
            (
                "causal with unequal numbers of tokens",
                call.is_causal and call.query_tokens != call.key_tokens,
            ),
        )
        return next((reason for reason, refused in rules if refused), None)

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count query and key in 8 bits, and a copy of the key and of the value."""
        rows = call.batch * call.heads * (call.query_tokens + 5 * call.key_tokens)
        return rows * max(64, call.head_dim)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention, (B, heads, queries, head dim), with scores rounded to 8 bits.

        The key's mean is subtracted here, since the package would do it in place.
        """
        from sageattention import sageattn  # pyright: ignore[reportMissingImports]

        key = key - key.mean(2, keepdim=True)
        return sageattn(
            query,
            key,
            value,
            tensor_layout="HND",
            is_causal=spec.causal,
            sm_scale=scale_of(query, spec),
            smooth_k=False,
        )


def _version() -> int:
    try:
        return int(importlib.metadata.version("sageattention").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 1
