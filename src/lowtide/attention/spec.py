"""Descriptions of attention calls and devices, for the backend selection."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, product
from typing import Literal, Protocol

import torch
from torch import Tensor


class AttentionDevice(Protocol):
    """Device facts that selection rules may use.

    Profiles of GPUs that are not in this machine implement it, too.
    """

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Kind of device."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability, (0, 0) on the CPU."""
        ...


@dataclass(frozen=True)
class LocalDevice:
    """A CPU or CUDA device of this machine."""

    kind: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] = (0, 0)

    @staticmethod
    def of(device: torch.device) -> LocalDevice:
        """Describe a tensor's device; anything but CUDA counts as the CPU."""
        if device.type != "cuda":
            return LocalDevice()
        return LocalDevice("cuda", torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class AttentionSpec:
    """Options of one attention call: scale, causality, dropout and grouped heads.

    A backend computes every field or says why it cannot. ``scale`` multiplies the scores, by
    default 1 / √(head dim). With ``causal`` query i sees keys 0..i, counted from the first key.
    ``dropout`` is the fraction of weights set to zero. With ``grouped`` query heads share key
    heads: head h takes key head h // (heads / key heads).
    """

    scale: float | None = None
    causal: bool = False
    dropout: float = 0.0
    grouped: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """Shapes, dtype and options of a call: everything that the backend selection uses.

    ``query_tokens``, ``key_tokens`` and the head dims are sizes. ``has_unit_stride`` means that the
    last dimension of every tensor is contiguous, ``is_aligned`` that every storage offset is a
    multiple of 16 bytes, ``is_uniform`` that query, key and value agree in batch and heads (except
    for heads declared as shared), ``mask_fits`` that a mask has 2 or 4 dimensions,
    ``mask_is_boolean`` that it is boolean. ``enabled`` are the PyTorch kernels that are not
    switched off.
    """

    dtype: torch.dtype
    head_dim: int
    query_tokens: int
    key_tokens: int
    value_head_dim: int | None = None
    has_mask: bool = False
    mask_is_boolean: bool = False
    mask_needs_grad: bool = False
    needs_grad: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    batch: int = 1
    heads: int = 1
    key_heads: int | None = None
    dims: int = 4
    has_unit_stride: bool = True
    is_aligned: bool = True
    is_uniform: bool = True
    mask_fits: bool = True
    enabled: frozenset[str] = frozenset({"flash", "efficient", "cudnn", "math"})

    @property
    def value_dim(self) -> int:
        """Head dim of the value, by default equal to query's and key's."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.key_heads is not None and self.key_heads != self.heads

    @property
    def score_count(self) -> int:
        """Number of scores of the whole call."""
        return self.batch * self.heads * self.query_tokens * self.key_tokens


def describe_call(
    tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, spec: AttentionSpec
) -> AttentionCall:
    """Describe a call of 4-dimensional tensors as an `AttentionCall`.

    ``tensors`` are query, key and value, each (B, heads, N, head dim), ``mask`` is broadcastable to
    (B, heads, queries, keys). ``needs_grad`` is set only if gradients are recorded now.
    """
    query, key, value = tensors
    # Heads may differ only where they are declared to be shared.
    outer = {t.shape[:-3] if spec.grouped else t.shape[:-2] for t in tensors}
    strided = tensors if mask is None else (*tensors, mask)
    return AttentionCall(
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_head_dim=value.shape[-1],
        query_tokens=query.shape[-2],
        key_tokens=key.shape[-2],
        has_mask=mask is not None,
        mask_is_boolean=mask is not None and mask.dtype == torch.bool,
        mask_needs_grad=mask is not None and mask.requires_grad,
        needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        is_causal=spec.causal,
        dropout=spec.dropout,
        batch=query.shape[0],
        heads=query.shape[-3] if query.dim() > 2 else 1,
        key_heads=key.shape[-3] if key.dim() > 2 else 1,
        dims=query.dim(),
        has_unit_stride=all(t.stride(-1) == 1 for t in strided),
        is_aligned=all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors),
        is_uniform=len(outer) == 1,
        mask_fits=mask is None or mask.dim() in (2, 4),
        enabled=_enabled(),
    )


def _enabled() -> frozenset[str]:
    cuda = torch.backends.cuda
    strict = torch.are_deterministic_algorithms_enabled()
    strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
    return _NAMED[
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled() and not strict,
        cuda.math_sdp_enabled(),
    ]


# Enabled kernels by the four switches.
_NAMED = {
    switches: frozenset(compress(("flash", "efficient", "cudnn", "math"), switches))
    for switches in product((False, True), repeat=4)
}
