"""Products of many tokens with a matrix."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Bytes of a result that is made at once: it stays in the cache of a processor's core.
_AT_ONCE = 1 << 20
_LEAST_TOKENS = 64
# Most channels whose products are left to oneDNN, which adds them up one after another. So does
# MKL up to 192; of more it adds the sums of parts, which rounds less. Up to here oneDNN's rounding
# is at most half as large again, and is not seen in the results of a whole network.
_ONEDNN_CHANNELS = 320


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` of (..., tokens, channels), faster for many on a CPU.

    There a product is added to a bias that was written to the whole result first. Here few channels
    are left to oneDNN, which adds the bias as it goes; of more, some tokens at a time are made, so
    that they are still in the cache: a quarter less time where there are ten thousand of them.
    Where gradients are recorded, in other types than fp32 and on other devices it is PyTorch's own.
    Exact: each number is the same sum, in the same order except for 193 to 320 channels on a CPU.
    """
    if weight.shape[1] <= _ONEDNN_CHANNELS:
        return linear_in_any_order(x, weight, bias)
    count, made = x.numel() // max(1, x.shape[-1]), weight.shape[0]
    at_once = max(_LEAST_TOKENS, _AT_ONCE // (4 * made) // _LEAST_TOKENS * _LEAST_TOKENS)
    # Tensors without bytes, made by the dozen, would take long.
    if count < 2 * at_once or isinstance(x, FakeTensor) or not _is_plain(x, weight):
        return F.linear(x, weight, bias)
    result = x.new_empty(*x.shape[:-1], made)
    given, found, turned = x.reshape(count, -1), result.view(count, made), weight.t()
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        if bias is None:
            torch.mm(given[part], turned, out=found[part])
        else:
            torch.addmm(bias, given[part], turned, out=found[part])
    return result


def linear_in_any_order(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False,
    plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`linear` by oneDNN, whatever the channels: faster still, but sums of hundreds of channels
    round two to three times as much as PyTorch's own, which is some parts in ten million. With
    ``gelu`` its results go through that (of the error function) while they are in a cache, or
    ``plus``, of their shape, is added to them.

    PyTorch's own where oneDNN is not known to be faster than what that takes.
    """
    if not (_has_onednn and x.numel() and _is_plain(x, weight)):
        found = F.linear(x, weight, bias)
        found = F.gelu(found) if gelu else found
        return found if plus is None else found + plus
    # PyTorch knows the shape of one without a sum only.
    if plus is not None and not isinstance(x, FakeTensor):
        return torch.ops.mkldnn._linear_pointwise.binary(x, plus, weight, bias, "add")
    then, how = ("gelu", "none") if gelu else ("none", "")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], how)


# The operator that PyTorch's own compiler takes for linear layers on the processors below.
ONEDNN_LINEAR = (
    torch.ops.mkldnn._linear_pointwise.default
    if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
)  # fmt: skip
_has_onednn = (
    platform.machine() in ("x86_64", "AMD64")
    and torch.backends.mkldnn.is_available()
    and ONEDNN_LINEAR is not None
)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether these are numbers of fp32 on a CPU, and no gradient is asked for."""
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if learning or type(x) not in (Tensor, FakeTensor) or not isinstance(weight, Tensor):
        return False
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
