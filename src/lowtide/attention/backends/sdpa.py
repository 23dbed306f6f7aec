"""PyTorch's scaled_dot_product_attention, each of its kernels by name."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.attention.backends.backend import Backend, Missing
from lowtide.attention.sdpa_rules import AttentionPath, refusal, sdpa_kernel_for
from lowtide.attention.spec import (
    AttentionCall,
    AttentionDevice,
    AttentionSpec,
    LocalDevice,
    describe_call,
)

_KERNELS: dict[AttentionPath, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cpu_flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_ABOUT = {
    "flash": "PyTorch's FlashAttention 2, on the CPU its own fused kernel",
    "efficient": "PyTorch's memory-efficient kernel, from Turing's predecessors on",
    "cudnn": "cuDNN's fused kernel",
    "math": "PyTorch's plain operators; holds all scores",
}
# Where a batch's index times this passes 31 bits, flash's backward pass reads what is not there.
_INDEXED = 1 << 31
# Keys that fill a vector of the widest processors.
_VECTOR = 16


class Sdpa(Backend):
    """One kernel of PyTorch's own, under the conditions of `sdpa_rules`."""

    # They come with PyTorch, whose releases test them on both kinds; each is still compared with
    # the reference before its first use.
    verified = frozenset({"cpu", "cuda"})

    def __init__(self, path: AttentionPath) -> None:
        self.name, self.about = f"sdpa-{path}", _ABOUT[path]
        self._path: AttentionPath = path

    def missing(self, device: AttentionDevice) -> Missing | None:
        """Fused kernels but flash need a CUDA device."""
        on_cpu = self._path in ("flash", "math")
        return Missing("needs a CUDA device") if device.kind == "cpu" and not on_cpu else None

    def refusal(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """PyTorch's own conditions, and results that are known to be wrong."""
        return known_bad(self._path, device, call) or refusal(self._on(device), device, call)

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Sums of rows for the fused kernels; for math the scores, their softmax and flags."""
        if self._path == "math":
            size = max(4, call.dtype.itemsize)
            return (2 * size + 1) * call.scores
        return 4 * call.batch * call.heads * call.query_tokens

    def most_heads(self, device: AttentionDevice, call: AttentionCall) -> int | None:
        """Also so few that 32 bits index the backward pass."""
        most = super().most_heads(device, call)
        if most is None or not call.needs_grad:
            return most
        row = -(-call.query_tokens // 128) * 128 * max(call.head_dim, 32)
        return max(1, min(most, (_INDEXED - 1) // row))

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """The result of a call that nobody described yet."""
        call = describe_call((query, key, value), mask, spec)
        return self.run_described(call, query, key, value, mask, spec)

    def run_described(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """The result. PyTorch's switches are touched only if it would choose another kernel."""
        if mask is not None and mask.dtype != torch.bool:
            # A mask of another type was read bit by bit (pytorch#191612); one that could need a
            # gradient, even where none is recorded, costs the fused kernels.
            fitting = mask.to(query.dtype)
            if fitting.requires_grad and not torch.is_grad_enabled():
                fitting = fitting.detach()
            if fitting is not mask:
                mask, call = fitting, describe_call((query, key, value), fitting, spec)
        device = LocalDevice.of(query.device)
        mine = _taken(device, call) == self._on(device)
        with nullcontext() if mine else sdpa_kernel(_KERNELS[self._path]):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                spec.dropout,
                spec.causal,
                scale=spec.scale,
                enable_gqa=spec.grouped,
            )

    def _on(self, device: AttentionDevice) -> AttentionPath:
        if device.kind == "cpu" and self._path == "flash":
            return "cpu_flash"
        return self._path


@lru_cache(maxsize=4096)
def _taken(device: LocalDevice, call: AttentionCall) -> AttentionPath:
    """`sdpa_kernel_for`, remembered: windows of one image ask the same thing hundreds of times."""
    return sdpa_kernel_for(device, call)


def known_bad(path: AttentionPath, device: AttentionDevice, call: AttentionCall) -> str | None:
    """Calls that a kernel accepts and computes wrongly, as PyTorch's issues tell."""
    if path == "cudnn" and call.has_mask and call.needs_grad and call.query_tokens % 128 == 64:
        return "its gradients can be NaN with a mask where tokens % 128 is 64 (pytorch#196678)"
    on_cpu = path == "flash" and device.kind == "cpu"
    if on_cpu and not call.has_mask and call.key_tokens < _VECTOR:
        # Seen with PyTorch 2.15: the largest score is taken vector by vector.
        return f"queries that are not finite come out as zeros with fewer than {_VECTOR} keys"
    return None
