"""Operators tuned for the CPU: linear layers over many tokens, softmax by exp2, layouts.

Whole SwinIR takes 1.07 times as long without the softmax. With attention of windows they make DRCT,
HAT and SwinIR run in about half of the time of spandrel's own modules.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable

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
# Factor of the scores: exp(x) = exp2(x · log2 e).
LOG2_E = math.log2(math.e)
# Sums within these bounds mean that no exp2 over- or underflowed, so the row maximum need not be
# subtracted first: scores up to about 41 in magnitude.
_LEAST_SUM, _MOST_SUM = 2.0**-60, 2.0**60


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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
    """Return whether `cpu_linear` multiplies (..., N, C) by (out channels, C) with oneDNN."""
    return weight.shape[1] <= _ONEDNN_CHANNELS and _can_onednn(x, weight)


def onednn_linear_any_layout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `cpu_linear` by oneDNN for any channels, with fused GELU or addition.

    Faster still than `cpu_linear`, but sums of hundreds of channels round two to three times as
    much as PyTorch's own, whose error is some parts in ten million. Falls back to PyTorch where
    oneDNN is not known to be faster.

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


def supports_exp2_softmax(*tensors: Tensor) -> bool:
    """Return whether `exp2_softmax_matmul` supports these tensors, of any shape.

    They must be fp32 or fp64, need no gradient, and not be compiled: a graph cannot inspect sums.
    """
    if torch.compiler.is_compiling():
        return False
    learning = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return not learning and all(one.dtype in (torch.float32, torch.float64) for one in tensors)


def exp2_softmax_matmul(
    scores: Callable[[], Tensor],
    matmul_values: Callable[[Tensor], Tensor],
    out: Tensor,
) -> None:
    """Write softmax(scores / `LOG2_E`) · values into ``out``.

    On the CPU, exp2 takes PyTorch's kernels a third of the time of a softmax, and the division by
    row sums is applied to the result, which is smaller than the scores. Exact up to rounding. A
    query whose sum is out of bounds is recomputed with its maximum subtracted: only that query, so
    no result depends on what else is computed.

    Args:
        scores: computes the scores, (..., queries, keys); called again if they are needed again.
        matmul_values: multiplies weights, (..., queries, keys), with the values.
        out: (..., queries, channels), written in place. A query that sees no key (all scores are
            -inf) gets NaN, as from softmax.
    """
    weights = scores()
    sums = torch.exp2(weights, out=weights).sum(-1, keepdim=True)
    torch.div(matmul_values(weights), sums, out=out)
    del weights  # free them before the scores are computed again
    if isinstance(sums, FakeTensor):
        return
    least, most = (one.item() for one in torch.aminmax(sums))
    if least >= _LEAST_SUM and most <= _MOST_SUM:  # False if any sum is NaN
        return
    within = (sums >= _LEAST_SUM) & (sums <= _MOST_SUM)
    weights = scores()
    weights.sub_(weights.amax(-1, keepdim=True))
    sums = torch.exp2(weights, out=weights).sum(-1, keepdim=True)
    torch.where(within, out, matmul_values(weights).div_(sums), out=out)


def to_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous (B, ...), copied image by image on a CPU.

    PyTorch transposes a single 2D matrix in blocks, but copies anything else element by element,
    even a batch of one such matrix: that takes three to four times as long for the pixels and
    channels of images.
    """
    if tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.dim() not in (3, 4):
        return tensor.contiguous()
    pixels = _flat(tensor)
    if pixels is None:
        return tensor.contiguous()
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for one, given in zip(result.view(pixels.shape), pixels, strict=True):
        one.copy_(given)
    return result


def _flat(tensor: Tensor) -> Tensor | None:
    """View as (B, a, b) by merging the last two of 4 dimensions, None if impossible."""
    if tensor.dim() == 3:
        return tensor
    if tensor.stride(2) == tensor.stride(3) * tensor.shape[3]:
        return tensor.flatten(2)
    return None
