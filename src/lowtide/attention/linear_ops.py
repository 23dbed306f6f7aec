"""Linear layers over many tokens, tuned for the CPU through oneDNN."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Bytes of the result per block: one block fits the cache of a CPU core.
_BLOCK_BYTES = 1 << 20
_LEAST_TOKENS = 64
# Most input channels for oneDNN, which accumulates them one after another. So does MKL up to 192;
# beyond that MKL sums partial sums, which rounds less. Up to this limit oneDNN's rounding error is
# at most 1.5 times as large, which does not show in the results of a whole network.
_ONEDNN_CHANNELS = 320


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` of (..., N, C), faster for many tokens on a CPU.

    PyTorch first writes the bias to the whole result on a CPU, then adds the product. This function
    gives up to 320 input channels to oneDNN, which adds the bias on the fly, and computes larger
    ones in blocks of tokens that fit the cache: a quarter less time for ten thousand tokens. It
    falls back to PyTorch if gradients are recorded, for dtypes other than fp32 and on other
    devices. Exact: each value is the same sum, in the same order except for 193 to 320 channels on
    a CPU.

    Args:
        x: (..., N, C).
        weight: (out channels, C).
        bias: (out channels,) or None.

    Returns:
        (..., N, out channels).
    """
    if weight.shape[1] <= _ONEDNN_CHANNELS:
        return onednn_linear_any_layout(x, weight, bias)
    count, made = x.numel() // max(1, x.shape[-1]), weight.shape[0]
    block_tokens = max(_LEAST_TOKENS, _BLOCK_BYTES // (4 * made) // _LEAST_TOKENS * _LEAST_TOKENS)
    # Blocks of fake tensors would only take time.
    if count < 2 * block_tokens or isinstance(x, FakeTensor) or not _is_cpu_inference(x, weight):
        return F.linear(x, weight, bias)
    result = x.new_empty(*x.shape[:-1], made)
    given, found, turned = x.reshape(count, -1), result.view(count, made), weight.t()
    for first in range(0, count, block_tokens):
        part = slice(first, first + block_tokens)
        if bias is None:
            torch.mm(given[part], turned, out=found[part])
        else:
            torch.addmm(bias, given[part], turned, out=found[part])
    return result


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` multiplies (..., N, C) by (out channels, C) with oneDNN."""
    return weight.shape[1] <= _ONEDNN_CHANNELS and _can_onednn(x, weight)


def onednn_linear_any_layout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `linear` by oneDNN for any channels, with fused GELU or addition.

    Faster still than `linear`, but sums of hundreds of channels round two to three times as much as
    PyTorch's own, whose error is some parts in ten million. Falls back to PyTorch where oneDNN is
    not known to be faster.

    Args:
        x: (..., N, C).
        weight: (out channels, C).
        bias: (out channels,).
        gelu: whether to apply GELU (by the error function) to the result while it is in the cache.
        plus: (..., N, out channels), added to the result; not with ``gelu``.

    Returns:
        (..., N, out channels).
    """
    if not _can_onednn(x, weight):
        found = F.linear(x, weight, bias)
        found = F.gelu(found) if gelu else found
        return found if plus is None else found + plus
    return onednn_linear(x, weight, bias, gelu=gelu, plus=plus)


def onednn_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `onednn_linear_any_layout` without its checks, (..., N, out channels).

    Only for tensors that oneDNN is known to support, and where `has_onednn`.
    """
    assert ONEDNN_LINEAR is not None
    # PyTorch has a fake kernel only for the operator without an addition.
    if plus is not None and not isinstance(x, FakeTensor):
        return torch.ops.mkldnn._linear_pointwise.binary(x, plus, weight, bias, "add")
    then, how = ("gelu", "none") if gelu else ("none", "")
    return ONEDNN_LINEAR(x, weight, bias, then, [], how)


# The operator that PyTorch Inductor uses for linear layers on x86 CPUs.
ONEDNN_LINEAR = (
    torch.ops.mkldnn._linear_pointwise.default
    if hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)
has_onednn = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()
    and ONEDNN_LINEAR is not None
)


def _can_onednn(x: Tensor, *weights: Tensor) -> bool:
    return has_onednn and x.numel() > 0 and all(_is_cpu_inference(x, weight) for weight in weights)


def _is_cpu_inference(x: Tensor, weight: Tensor) -> bool:
    """Return whether these are fp32 tensors on a CPU that need no gradient."""
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if learning or type(x) not in (Tensor, FakeTensor) or not isinstance(weight, Tensor):
        return False
    if is_traceable_wrapper_subclass(weight):  # sharded, or quantized by the user: F.linear alone
        return False
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
