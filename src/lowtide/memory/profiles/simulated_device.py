"""Autocast and attention in a trace on fake CPU tensors as another device would run them.

Why autocast: CUDA's list of operators that run in fp32 is longer than the CPU's. It has the
normalizations, softmax, powers and resizing, whose results are kept for the backward pass. By the
CPU's rules a diffusion U-Net would seem to need little more than half of its memory. The rules are
those of aten/src/ATen/autocast_mode.h in pytorch/pytorch, releases 2.8 to 2.15.

Why attention: on a host without a GPU, fake CUDA tensors always take the math path and fake CPU
tensors always the CPU's fused kernel, so that neither shows what a GPU would allocate. The kernel
that the device selects and its memory are reproduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lowtide.attention.patch import cast_as_autocast, copy_with_globals
from lowtide.attention.sdpa_rules import AttentionPath, promotes_three_dimensions, sdpa_kernel_for
from lowtide.attention.spec import AttentionCall, AttentionSpec, describe_call
from lowtide.memory.profiles.attention_kernels import flash_forward_bytes, run_fake_attention
from lowtide.memory.profiles.profile import DeviceProfile

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# Python functions that call one of these operators are in the list under their own names.
_FP32_FUNCTIONS = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow square
    softplus layer_norm native_layer_norm group_norm norm normalize frobenius_norm nuclear_norm
    vector_norm linalg_vector_norm linalg_norm matrix_norm linalg_matrix_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy
    gaussian_nll_loss dist pdist cdist renorm logsumexp interpolate upsample upsample_nearest
    upsample_bilinear grid_sample
    """.split()
)
# These get fp32 as the result's type instead, which needs no fp32 copy of their input.
_FP32_RESULT_FUNCTIONS = frozenset(
    {"softmax", "log_softmax", "softmin", "cumprod", "cumsum", "prod", "sum"}
)
# In the lists of some devices or releases only.
_FP32_FUNCTIONS_IF_REGISTERED = {"rms_norm": "aten::rms_norm"}
_DUNDER_NAMES = {
    "__pow__": "pow",
    "__rpow__": "pow",
    "__ipow__": "pow",
    "__rtruediv__": "reciprocal",
    "__rdiv__": "reciprocal",
}
# In fp32 on the CPU only: on CUDA they run in the type of their input.
_INPUT_DTYPE_FUNCTIONS = frozenset(
    """
    pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d quantile nanquantile polar
    view_as_complex
    """.split()
)


@contextmanager
def simulate_autocast(profile: DeviceProfile) -> Iterator[None]:
    """Context in which CPU autocast on fake tensors follows ``profile``'s device.

    Put it around a whole trace, backward pass included: checkpointing runs operators again
    there. Nothing changes for the CPU, and without autocast. A Python function of PyTorch that
    is not in the list keeps the CPU's rules for what it calls.
    """
    if profile.kind == "cpu":
        yield
        return
    with _CudaAutocast():
        yield


class _CudaAutocast(TorchFunctionMode):
    """Function mode that runs the operators of CUDA's fp32 list in fp32.

    Those of the CPU's own list run in the type of their input.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        name = _DUNDER_NAMES.get(name, name)
        if name in _FP32_FUNCTIONS or _is_registered(name):
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        elif name in _FP32_RESULT_FUNCTIONS:
            kwargs = _with_fp32_dtype(args, kwargs)
        elif name not in _INPUT_DTYPE_FUNCTIONS:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor


def _with_fp32_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Set the result type to fp32 in the keywords, unless the caller sets one."""
    tensor = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if tensor is None or tensor.dtype not in _LOW_PRECISION or has_dtype:
        return kwargs
    return {**kwargs, "dtype": torch.float32}


def _is_registered(name: str) -> bool:
    full = _FP32_FUNCTIONS_IF_REGISTERED.get(name)
    return full is not None and torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA")


@contextmanager
def simulate_attention(
    profile: DeviceProfile, seen: set[AttentionCall] | None = None
) -> Iterator[Counter[AttentionPath]]:
    """Context in which attention on fake tensors allocates as on ``profile``'s device.

    Results, saved tensors, padded copies and gradients are those of the kernel that the device
    selects, and its own workspace is allocated while it runs. Keep the context open over the
    backward pass: checkpointing runs attention again there. Covers
    F.scaled_dot_product_attention, its aten operator and F.multi_head_attention_forward
    (nn.MultiheadAttention, which then does without its fast path); other attention packages are
    not covered. Yields the count of calls by kernel, and adds the calls to ``seen``. On the CPU
    nothing is replaced.

    Raises:
        TypeError: Attention is called with real tensors.
    """
    log: Counter[AttentionPath] = Counter()
    if profile.kind == "cpu":
        yield log
        return
    with _SimulatedAttention(profile, log, set() if seen is None else seen):
        yield log


def runs_alike(one: DeviceProfile, other: DeviceProfile, calls: Iterable[AttentionCall]) -> bool:
    """Return whether a step with these attention calls allocates alike on two devices."""
    return one.kind == other.kind and all(
        _attention_memory(one, call) == _attention_memory(other, call) for call in calls
    )


def _attention_memory(profile: DeviceProfile, call: AttentionCall) -> tuple[AttentionPath, int]:
    """Return the kernel of a call, and its workspace as far as the size of the device decides."""
    path = sdpa_kernel_for(profile, call)
    return path, flash_forward_bytes(call, profile.multiprocessors) if path == "flash" else 0


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

    def __init__(
        self, profile: DeviceProfile, log: Counter[AttentionPath], seen: set[AttentionCall]
    ) -> None:
        super().__init__()
        self._profile, self._log, self._seen = profile, log, seen
        self._wrappers = {
            carrier: copy_with_globals(carrier, _NO_OVERRIDES) for carrier in _ATTENTION_WRAPPERS
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
        kind = query.device.type
        query, key, value, attn_mask = cast_as_autocast(query, key, value, attn_mask)
        mixed = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if mixed else nullcontext():
            spec = AttentionSpec(scale, is_causal, dropout_p, enable_gqa)
            call = describe_call((query, key, value), attn_mask, spec)
            path = sdpa_kernel_for(self._profile, call)
            self._log[path] += 1
            self._seen.add(call)
            return run_fake_attention(
                path,
                call,
                (query, key, value),
                attn_mask,
                scale,
                enable_gqa,
                self._profile.multiprocessors,
            )
