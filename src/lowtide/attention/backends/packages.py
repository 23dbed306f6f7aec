"""Backends of packages that compile their kernels: flash-attn, SageAttention, FlexAttention.

The first two are installed separately, and the last is PyTorch's own, by Triton.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.backends.backend import AttentionBackend, MissingRequirement, score_scale
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec
from lowtide.core.errors import install_extra

_FLASH_NEEDS = (
    "flash-attn 2, an NVIDIA GPU (Ampere or newer), and nvcc with a C++ compiler to build it"
)
_SAGE_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
_LEAST_FLEX_DIM = 16


class Flash2Backend(AttentionBackend):
    """flash-attn 2 (Dao, arXiv 2307.08691), whose layout is (B, N, heads, head dim)."""

    name = "flash2"
    about = "the package flash-attn: fp16 and bf16, no mask"

    def missing_requirement(self, device: AttentionDevice) -> MissingRequirement | None:
        """Require the package and an NVIDIA GPU of compute capability 8.0 or more."""
        if importlib.util.find_spec("flash_attn") is None:
            return MissingRequirement(
                f"not installed; needs {_FLASH_NEEDS}", install_extra("flash")
            )
        if device.kind != "cuda" or device.capability < (8, 0):
            return MissingRequirement("needs an NVIDIA GPU of compute capability 8.0 or more")
        return None

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse masks, head dims over 256 and dtypes other than fp16 and bf16.

        Causal attention with unequal numbers of tokens as well, since the package aligns them by
        the last key.
        """
        return (
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


class SageBackend(AttentionBackend):
    """Quantized attention by ``sageattn``: scores are rounded to 8 bits.

    The registry has version 1 (Zhang et al., arXiv 2410.02367). Version 2 (arXiv 2411.10958) is
    installed from its sources and has the same function name.
    """

    name = "sage"
    about = "the package sageattention: 8-bit scores, inference only"

    def missing_requirement(self, device: AttentionDevice) -> MissingRequirement | None:
        """Require the package and a supported NVIDIA compute capability."""
        if importlib.util.find_spec("sageattention") is None:
            return MissingRequirement(
                "not installed; needs Triton and an NVIDIA GPU, Ampere or newer (PyPI has"
                " version 1; version 2 is built from its sources with nvcc)",
                install_extra("sage"),
            )
        if device.kind != "cuda" or device.capability not in _SAGE_CAPABILITIES:
            names = ", ".join(f"{major}.{minor}" for major, minor in _SAGE_CAPABILITIES)
            return MissingRequirement(f"needs an NVIDIA GPU of compute capability {names}")
        return None

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse gradients (which would silently be zero), masks and dropout."""
        widths = (64, 96, 128) if _sage_version() < 2 else tuple(range(1, 129))
        return (
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
            sm_scale=score_scale(query, spec),
            smooth_k=False,
        )


def _sage_version() -> int:
    try:
        return int(importlib.metadata.version("sageattention").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 1


class FlexBackend(AttentionBackend):
    """FlexAttention (Dong et al., arXiv 2412.05496) with masks as a ``score_mod``.

    Compiled per shape: the first call for one takes seconds.
    """

    name = "flex"
    about = "PyTorch's FlexAttention, compiled by Triton"

    def missing_requirement(self, device: AttentionDevice) -> MissingRequirement | None:
        """Require Triton and a GPU; compiled CPU kernels are slower than sdpa-flash."""
        if device.kind != "cuda":
            return MissingRequirement(
                "needs a CUDA device: compiled for the CPU it is slower than sdpa-flash"
            )
        if importlib.util.find_spec("triton") is None:
            return MissingRequirement("Triton is not installed", "pip install triton")
        return None

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse dropout, head dims below 16 and fp64."""
        return (
            ("there is dropout", call.dropout > 0),
            (f"a head dimension is below {_LEAST_FLEX_DIM}", call.head_dim < _LEAST_FLEX_DIM),
            (f"the value's dimension is below {_LEAST_FLEX_DIM}", call.value_dim < _LEAST_FLEX_DIM),
            ("the dtype is fp64", call.dtype == torch.float64),
        )

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention: (B, heads, queries, value's head dim).

        Mask and causality are fused as a ``score_mod``.
        """
        change = None if mask is None and not spec.causal else _score_mod(query, key, mask, spec)
        return _compiled_flex()(
            query, key, value, score_mod=change, scale=spec.scale, enable_gqa=spec.grouped
        )


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _score_mod(
    query: Tensor, key: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Callable[..., Tensor]:
    """Return the ``score_mod`` that applies mask and causality to one score."""
    shape = *query.shape[:3], key.shape[2]
    whole = None if mask is None else mask.expand(shape)
    truth = whole is not None and whole.dtype == torch.bool

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if whole is not None:
            said = whole[batch, head, row, column]
            score = torch.where(said, score, -torch.inf) if truth else score + said
        return torch.where(row >= column, score, -torch.inf) if spec.causal else score

    return change
