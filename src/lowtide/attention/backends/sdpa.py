"""Backends for each kernel of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.attention.backends.backend import AttentionBackend, MissingRequirement
from lowtide.attention.sdpa_rules import AttentionPath, kernel_unsupported_reason, sdpa_kernel_for
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
    "efficient": "PyTorch's memory-efficient kernel, also for GPUs older than Turing",
    "cudnn": "cuDNN's fused kernel",
    "math": "PyTorch's plain operators; materializes all scores",
}
# Flash's backward pass reads out of bounds where batch index × row size exceeds 31 bits.
_INDEXED = 1 << 31
# fp32 values in the widest SIMD register of a CPU.
_VECTOR = 16


class SdpaBackend(AttentionBackend):
    """One kernel of PyTorch's own, under the conditions of `sdpa_rules`."""

    # PyTorch's releases test them on both kinds of device; each is still compared with the
    # reference before its first use.
    verified_on = frozenset({"cpu", "cuda"})

    def __init__(self, path: AttentionPath) -> None:
        self.name, self.about = f"sdpa-{path}", _ABOUT[path]
        self._path: AttentionPath = path

    def missing_requirement(self, device: AttentionDevice) -> MissingRequirement | None:
        """Require a CUDA device for all kernels but flash and math."""
        on_cpu = self._path in ("flash", "math")
        return (
            MissingRequirement("needs a CUDA device")
            if device.kind == "cpu" and not on_cpu
            else None
        )

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Refuse calls that PyTorch's kernel refuses or is known to compute wrongly."""
        return known_bad_reason(self._path, device, call) or kernel_unsupported_reason(
            self._on(device), device, call
        )

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count the log-sum-exp of each query; for math the scores, softmax and mask."""
        if self._path == "math":
            size = max(4, call.dtype.itemsize)
            return (2 * size + 1) * call.score_count
        return super().workspace_bytes(device, call)

    def max_heads(self, device: AttentionDevice, call: AttentionCall) -> int | None:
        """Return the launch limit, or less where a backward pass needs 32-bit indices."""
        most = super().max_heads(device, call)
        if most is None or not call.needs_grad:
            return most
        row = -(-call.query_tokens // 128) * 128 * max(call.head_dim, 32)
        return max(1, min(most, (_INDEXED - 1) // row))

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Describe the call, then compute it: (B, heads, queries, value's head dim)."""
        call = describe_call((query, key, value), mask, spec)
        return self.run_with_call(call, query, key, value, mask, spec)

    def run_with_call(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """Compute attention with this kernel: (B, heads, queries, value's head dim).

        PyTorch's kernel switches are changed only if it would choose another kernel.
        """
        if mask is not None and mask.dtype != torch.bool:
            # The kernels read a mask of another dtype bit by bit (pytorch#191612). One that
            # requires a gradient, even where none is recorded, rules out the fused kernels.
            fitting = mask.to(query.dtype)
            if fitting.requires_grad and not torch.is_grad_enabled():
                fitting = fitting.detach()
            if fitting is not mask:
                mask, call = fitting, describe_call((query, key, value), fitting, spec)
        device = LocalDevice.of(query.device)
        mine = _selected_kernel(device, call) == self._on(device)
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
def _selected_kernel(device: LocalDevice, call: AttentionCall) -> AttentionPath:
    """Cached `sdpa_kernel_for`.

    The windows of one image need the same answer hundreds of times.
    """
    return sdpa_kernel_for(device, call)


def known_bad_reason(
    path: AttentionPath, device: AttentionDevice, call: AttentionCall
) -> str | None:
    """Return why a kernel computes a call it accepts wrongly, None if it does not."""
    if path == "cudnn" and call.has_mask and call.needs_grad and call.query_tokens % 128 == 64:
        return "its gradients can be NaN with a mask where tokens % 128 is 64 (pytorch#196678)"
    on_cpu = path == "flash" and device.kind == "cpu"
    if on_cpu and not call.has_mask and call.key_tokens < _VECTOR:
        # Seen with PyTorch 2.15, whose row maximum is computed per SIMD vector.
        return f"queries that are not finite give zeros with fewer than {_VECTOR} keys"
    return None
