"""Softmax by powers of two, for scores that are made where they are used."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# What scores are multiplied by, so that powers of two are what exponentials were.
LOG2_E = math.log2(math.e)
# Sums of powers within which nothing over- or underflows, so that no largest score need be taken
# off before: scores of up to 41 in size.
_LEAST_SUM, _MOST_SUM = 2.0**-60, 2.0**60


def supports_exp2_softmax(*tensors: Tensor) -> bool:
    """Whether `exp2_softmax_matmul` can compute with these: fp32 or fp64, and neither gradients nor
    a graph, which could not look at sums, are asked for."""
    if torch.compiler.is_compiling():
        return False
    learning = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return not learning and all(one.dtype in (torch.float32, torch.float64) for one in tensors)


def exp2_softmax_matmul(
    scores: Callable[[], Tensor],
    weigh: Callable[[Tensor], Tensor],
    out: Tensor,
    *,
    zeros_for_blind: bool = False,
) -> None:
    """Put softmax(scores / `LOG2_E`) · values into ``out``.

    Powers of two take PyTorch's CPU kernels a third of the time of a softmax, and the sums divide
    what comes of the values, which is smaller than the scores. Exact to rounding. A query whose sum
    is out of bounds is computed again with its largest score taken off: it alone, so that no result
    depends on what else is computed.

    Args:
        scores: makes them anew, (..., queries, keys); called again if they are needed again.
        weigh: multiplies weights, (..., queries, keys), and values.
        out: (..., queries, channels).
        zeros_for_blind: whether a query that sees no key, whose scores are all -inf, gets zeros;
            otherwise it gets what a softmax gives, which is not a number.
    """
    weights = scores()
    sums = torch.exp2(weights, out=weights).sum(-1, keepdim=True)
    torch.div(weigh(weights), sums, out=out)
    del weights  # or they would be held beside the next ones
    if isinstance(sums, FakeTensor):
        return
    least, most = (one.item() for one in torch.aminmax(sums))
    if least >= _LEAST_SUM and most <= _MOST_SUM:  # not so if one is not a number
        return
    within = (sums >= _LEAST_SUM) & (sums <= _MOST_SUM)
    weights = scores()
    largest = weights.amax(-1, keepdim=True)
    sums = torch.exp2(weights.sub_(largest), out=weights).sum(-1, keepdim=True)
    found = weigh(weights).div_(sums)
    if zeros_for_blind:
        found.masked_fill_(largest == -torch.inf, 0)
    torch.where(within, out, found, out=out)
