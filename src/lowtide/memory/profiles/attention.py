"""Attention in a fake-tensor trace as another device would run it.

The kernel that the device selects and its memory are reproduced.

Why: on a host without a GPU, fake CUDA tensors always take the math path and fake CPU tensors
always the CPU's fused kernel, so that neither shows what a GPU would allocate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.attention.patch import with_globals
from lowtide.attention.sdpa_rules import AttentionPath, promotes_three_dimensions, sdpa_kernel_for
from lowtide.attention.spec import AttentionSpec, describe_call
from lowtide.memory.profiles.attention_kernels import run_fake_attention
from lowtide.memory.profiles.profile import DeviceProfile


@contextmanager
def simulate_attention(profile: DeviceProfile) -> Iterator[Counter[AttentionPath]]:
    """Context in which attention on fake tensors allocates as on ``profile``'s device.

    Results, saved tensors, padded copies and gradients are those of the kernel that the device
    selects, and its own workspace is allocated while it runs. Keep the context open over the
    backward pass: checkpointing runs attention again there. Covers
    F.scaled_dot_product_attention, its aten operator and F.multi_head_attention_forward
    (nn.MultiheadAttention, which then does without its fast path); other attention packages are
    not covered. Yields the count of calls by kernel. On the CPU nothing is replaced.

    Raises:
        TypeError: Attention is called with real tensors.
    """
    log: Counter[AttentionPath] = Counter()
    if profile.kind == "cpu":
        yield log
        return
    with _SimulatedAttention(profile, log):
        yield log


_ATTENTION = frozenset(
    {
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)


# Python functions that run attention inside. A mode does not see calls made while it handles a
# call, and these reach it as one call: `backward` runs attention where it is checkpointed.
_ATTENTION_WRAPPERS: tuple[Any, ...] = (
    F.multi_head_attention_forward,
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
)
_NO_OVERRIDES: dict[str, Any] = {
    "has_torch_function": lambda tensors: False,
    "has_torch_function_unary": lambda tensor: False,
}


class _SimulatedAttention(TorchFunctionMode):
    """Function mode that redirects attention calls to the kernels of another device."""

    def __init__(self, profile: DeviceProfile, log: Counter[AttentionPath]) -> None:
        super().__init__()
        self._profile, self._log = profile, log
        self._wrappers = {
            carrier: with_globals(carrier, _NO_OVERRIDES) for carrier in _ATTENTION_WRAPPERS
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        if func in self._wrappers:
            with self:
                return self._wrappers[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() == key.dim() == value.dim() == 3 and promotes_three_dimensions():
            if attn_mask is not None:
                attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
            return self._attend(
                query[None],
                key[None],
                value[None],
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
            ).squeeze(0)
        with _autocast_inputs(query, key, value, attn_mask) as (query, key, value, attn_mask):
            spec = AttentionSpec(scale, is_causal, dropout_p, enable_gqa)
            call = describe_call((query, key, value), attn_mask, spec)
            path = sdpa_kernel_for(self._profile, call)
            self._log[path] += 1
            return run_fake_attention(
                path,
                call,
                (query, key, value),
                attn_mask,
                scale,
                enable_gqa,
                self._profile.multiprocessors,
            )


@contextmanager
def _autocast_inputs(*tensors: Tensor | None) -> Iterator[list[Any]]:
    """Context with the tensors cast as autocast would pass them to attention.

    Attention inside runs without autocast.
    """
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(kind):
        yield list(tensors)
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield [
            t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)
            for t in tensors
        ]
