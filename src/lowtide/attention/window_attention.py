"""Attention in batches of windows with a shared bias and masks for a few.

Scores of all windows would be the largest tensor of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.cpu_ops import LOG2_E, exp2_softmax_matmul, supports_exp2_softmax
from lowtide.attention.functional import attention
from lowtide.attention.spec import AttentionSpec

# Heads with fewer channels are faster as explicit matrix products: a block of them is too little
# work for PyTorch's CPU kernel.
MIN_HEAD_DIM = 16
# Bytes of scores per block of explicit products: they fit the CPU's cache.
_SCORE_BYTES = 4 << 20
# Fraction of windows with one pattern above which the pattern is applied to all of them, which
# avoids gathering copies.
_DOMINANT_FRACTION = 0.75


@dataclass(frozen=True)
class MaskPattern:
    """Indices of windows that share one additive mask, as in shifted-window attention.

    ``windows`` are the indices of the windows. ``mask``, (1, 1, N, N), is added to their scores on
    top of the bias, None for nothing. If ``windows`` is a range, the windows are contiguous and
    need no gathering copy.
    """

    windows: Sequence[int]
    mask: Tensor | None
    _indices: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def indices(self, device: torch.device) -> Tensor:
        """Return the indices as an int64 tensor (windows,), cached per device.

        Cached so that a GPU does not wait for a copy in every band.
        """
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.windows, device=device)
        return self._indices[device]


def patterns_in_range(patterns: Sequence[MaskPattern], first: int, end: int) -> list[MaskPattern]:
    """Restrict patterns to windows ``first`` to ``end``.

    Indices of the result are relative to ``first``.
    """
    found = []
    for one in patterns:
        places = one.windows
        if isinstance(places, range):
            left = range(max(places[0], first) - first, min(places[-1] + 1, end) - first)
        else:
            left = [place - first for place in places if first <= place < end]
        if left:
            found.append(MaskPattern(left, one.mask))
    return found


def attend_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    patterns: Sequence[MaskPattern],
    scale: float,
) -> Tensor:
    """Compute softmax(scale · Q Kᵀ + bias + pattern) V in every window.

    Exact up to rounding; no scores are kept. If nearly all windows share one pattern, as with the
    mask of shifted windows, it is applied to all of them and the others are recomputed.

    Args:
        query: (windows, heads, N, head dim).
        key, value: like ``query``; their number of tokens may differ.
        bias: (1, heads, queries, keys) or with fewer leading dimensions.
        patterns: cover all windows or are empty; each ``mask`` is (1, 1, queries, keys) or has
            fewer leading dimensions.
        scale: factor of the scores.

    Returns:
        (windows, heads, N, head dim).
    """
    bias = None if bias is None else _four(bias)
    if not patterns:
        return _attend(query, key, value, bias, scale)
    if all(isinstance(one.windows, range) for one in patterns):
        return _attend_ranges(query, key, value, bias, patterns, scale)
    usual, *others = sorted(patterns, key=lambda one: -len(one.windows))
    if len(usual.windows) >= _DOMINANT_FRACTION * len(query):
        result = _attend(query, key, value, _sum(bias, usual.mask), scale)
    else:
        result = _empty(query, value)
        others = [usual, *others]
    for one in others:
        places = one.indices(query.device)
        q, k, v = (each.index_select(0, places) for each in (query, key, value))
        result.index_copy_(0, places, _attend(q, k, v, _sum(bias, one.mask), scale))
    return result


def _attend_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    patterns: Sequence[MaskPattern],
    scale: float,
) -> Tensor:
    """Attend each pattern's contiguous windows through views, without copies."""
    found = []
    for one in sorted(patterns, key=lambda one: one.windows[0]):
        part = slice(one.windows[0], one.windows[-1] + 1)
        q, k, v = (each[part] for each in (query, key, value))
        found.append(_attend(q, k, v, _sum(bias, one.mask), scale))
    if len(found) == 1:
        return found[0]
    return torch.cat([one.transpose(1, 2) for one in found]).transpose(1, 2)


def _empty(query: Tensor, value: Tensor) -> Tensor:
    """Allocate a result in PyTorch's memory layout (windows, N, heads, head dim)."""
    windows, heads, places = query.shape[:3]
    return query.new_empty(windows, places, heads, value.shape[-1]).transpose(1, 2)


def _sum(bias: Tensor | None, added: Tensor | None) -> Tensor | None:
    if added is None:
        return bias
    return _four(added) if bias is None else bias + _four(added)


def _four(added: Tensor) -> Tensor:
    """Reshape to the 4 dimensions of the scores, which PyTorch's fast kernels require."""
    return added.reshape(*(1,) * (4 - added.dim()), *added.shape[-4:])


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if not _is_on_cpu(query):
        # Dispatch to the best backend of the device, within its launch limits.
        return attention(query, key, value, bias, AttentionSpec(scale))
    if query.shape[-1] < MIN_HEAD_DIM:
        return _attend_explicitly(query, key, value, bias, scale)
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scale)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attend by explicit products and a softmax, in blocks of windows."""
    windows, heads, places = query.shape[:3]
    at_once = max(1, _SCORE_BYTES // (heads * places * key.shape[2] * query.itemsize))
    result = _empty(query, value)
    use_exp2 = supports_exp2_softmax(query, key, value, *([] if bias is None else [bias]))
    unit = LOG2_E if use_exp2 else 1.0
    for first in range(0, windows, at_once):
        part = slice(first, first + at_once)
        scores = partial(_scores, query[part], key[part], bias, scale, unit)
        if use_exp2:
            exp2_softmax_matmul(scores, partial(torch.matmul, other=value[part]), result[part])
        else:
            result[part] = scores().softmax(-1) @ value[part]
    return result


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, unit: float) -> Tensor:
    """Compute ``unit`` times (scale · Q Kᵀ + added)."""
    scores = (query * (scale * unit)) @ key.transpose(-2, -1)
    # In place, and without a scaled copy of ``added``, which may be as large as many windows'
    # queries.
    return scores if bias is None else scores.add_(bias, alpha=unit)
