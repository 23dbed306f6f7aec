"""Softmax by powers of two fused with the product with values, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Factor of the scores: exp(x) = exp2(x · log2 e).
LOG2_E = math.log2(math.e)
# Sums within these bounds mean that no exp2 over- or underflowed, so the row maximum need not be
# subtracted first: scores up to about 41 in magnitude.
_LEAST_SUM, _MOST_SUM = 2.0**-60, 2.0**60


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
    *,
    zero_fully_masked: bool = False,
) -> None:
    """Write softmax(scores / `LOG2_E`) · values into ``out``.

    On the CPU, exp2 takes PyTorch's kernels a third of the time of a softmax, and the division by
    row sums is applied to the result, which is smaller than the scores. Exact up to rounding. A
    query whose sum is out of bounds is recomputed with its maximum subtracted: only that query, so
    no result depends on what else is computed.

    Args:
        scores: computes the scores, (..., queries, keys); called again if they are needed again.
        matmul_values: multiplies weights, (..., queries, keys), with the values.
        out: (..., queries, channels), written in place.
        zero_fully_masked: whether a query that sees no key (all scores are -inf) gets zeros;
            otherwise it gets NaN, as from softmax.
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
    largest = weights.amax(-1, keepdim=True)
    sums = torch.exp2(weights.sub_(largest), out=weights).sum(-1, keepdim=True)
    found = matmul_values(weights).div_(sums)
    if zero_fully_masked:
        found.masked_fill_(largest == -torch.inf, 0)
    torch.where(within, out, found, out=out)
