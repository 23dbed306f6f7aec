"""Products of many tokens with a matrix."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.core.repeat import repeat_call

# Weight and bias of a linear layer.
Layer = tuple[Tensor, Tensor | None]


def linear_layer(tensors: Sequence[Tensor]) -> Layer:
    """The layer of a weight, and of a bias behind it or none."""
    weight, *bias = tensors
    return weight, bias[0] if bias else None


# Bytes of a result that is made at once: it stays in the cache of a processor's core.
_AT_ONCE = 1 << 20
_LEAST_TOKENS = 64
# Most channels whose products are left to oneDNN, which adds them up one after another. So does
# MKL up to 192; of more it adds the sums of parts, which rounds less. Up to here oneDNN's rounding
# is at most half as large again, and is not seen in the results of a whole network.
_ONEDNN_CHANNELS = 320
# Of two layers: tokens that go through both at once, which stay in a cache without keeping threads
# waiting, and most channels between them that are summed at once, beyond which sums round more.
_TOKENS_AT_ONCE, _SUMMED = 2048, 192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` of (..., tokens, channels), faster for many on a CPU.

    There a product is added to a bias that was written to the whole result first. Here few channels
    are left to oneDNN, which adds the bias as it goes; of more, some tokens at a time are made, so
    that they are still in the cache: a quarter less time where there are ten thousand of them.
    Where gradients are recorded, in other types than fp32 and on other devices it is PyTorch's own.
    Exact: each number is the same sum, in the same order except for 193 to 320 channels on a CPU.
    """
    if weight.shape[1] <= _ONEDNN_CHANNELS:
        return onednn_linear_any_layout(x, weight, bias)
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


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` leaves a product of these to oneDNN."""
    return weight.shape[1] <= _ONEDNN_CHANNELS and _can_onednn(x, weight)


def onednn_linear_any_layout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """`linear` by oneDNN, whatever the channels: faster still, but sums of hundreds of channels
    round two to three times as much as PyTorch's own, which is some parts in ten million. With
    ``gelu`` its results go through that (of the error function) while they are in a cache, or
    ``plus``, of their shape, is added to them.

    PyTorch's own where oneDNN is not known to be faster than what that takes.
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
    """`onednn_linear_any_layout` of tensors that oneDNN is known to take, where `has_onednn`."""
    assert ONEDNN_LINEAR is not None
    # PyTorch knows the shape of one without a sum only.
    if plus is not None and not isinstance(x, FakeTensor):
        return torch.ops.mkldnn._linear_pointwise.binary(x, plus, weight, bias, "add")
    then, how = ("gelu", "none") if gelu else ("none", "")
    return ONEDNN_LINEAR(x, weight, bias, then, [], how)


def mlp(
    x: Tensor, first: Layer, second: Layer, plus: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``second(gelu(first(x)))`` of (..., channels), and ``plus``, of the result's shape, added to
    it: a third less time on a CPU than layer by layer, with no more rounding than PyTorch's own.

    What lies between is made for some tokens and some channels at a time; the second layer's sums
    go on from those of the channels before. The result is put into ``out``, if that is given: it
    is in order, and may be ``x`` or ``plus`` itself.
    """
    if not _can_onednn(x, first[0], second[0]):
        found = linear(F.gelu(linear(x, *first)), *second)
        found = found if plus is None else found + plus
        return found if out is None else out.copy_(found)
    layers = _in_pieces(first, second)
    made = len(second[0])
    found = x.new_empty(*x.shape[:-1], made) if out is None else out
    results, tokens = found.view(-1, made), x.reshape(-1, x.shape[-1])
    added = None if plus is None else plus.reshape(results.shape)

    def of_part(number: int) -> None:
        part = slice(number * _TOKENS_AT_ONCE, (number + 1) * _TOKENS_AT_ONCE)
        sums = _both_layers(tokens[part], layers, second[1])
        if added is None:
            results[part] = sums
        else:
            torch.add(sums, added[part], out=results[part])

    full, rest = divmod(len(tokens), _TOKENS_AT_ONCE)
    # Without bytes one part is as good as all: none of them takes more.
    repeat_call(full, of_part, alike=isinstance(x, FakeTensor))
    if rest:
        of_part(full)
    return found


def mlp_workspace_bytes(tokens: int, first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Bytes that `mlp` takes for itself, at most, of weights of these shapes."""
    held = _SUMMED + 2 * second[0]
    return 4 * (min(tokens, _TOKENS_AT_ONCE) * held + first[0] * (first[1] + second[0]))


# Of a first layer some results' weights and bias, and their weights in the second.
_Pieces = list[tuple[Tensor, Tensor | None, Tensor]]


def _in_pieces(first: Layer, second: Layer) -> _Pieces:
    between = len(first[0])
    size = -(-between // -(-between // _SUMMED))
    weights = first[0].contiguous().split(size)
    biases = [None] * len(weights) if first[1] is None else first[1].split(size)
    # oneDNN is a thousand times slower with columns of a larger matrix.
    columns = [one.contiguous() for one in second[0].split(size, 1)]
    return list(zip(weights, biases, columns, strict=True))


def _both_layers(tokens: Tensor, layers: _Pieces, bias: Tensor | None) -> Tensor:
    sums: Tensor | None = None
    for weight, shift, columns in layers:
        between = onednn_linear(tokens, weight, shift, gelu=True)
        sums = onednn_linear(between, columns, bias if sums is None else None, plus=sums)
    assert sums is not None
    return sums


# The operator that PyTorch's own compiler takes for linear layers on the processors below.
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
    return has_onednn and x.numel() > 0 and all(_is_plain(x, weight) for weight in weights)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether these are numbers of fp32 on a CPU, and no gradient is asked for."""
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if learning or type(x) not in (Tensor, FakeTensor) or not isinstance(weight, Tensor):
        return False
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
