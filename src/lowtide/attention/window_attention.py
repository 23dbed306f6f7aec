"""Attention within many windows that share a bias, and of which few are masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.exp2_softmax import LOG2_E, exp2_softmax_matmul, supports_exp2_softmax
from lowtide.attention.functional import attention
from lowtide.attention.spec import AttentionSpec

# Heads with fewer channels are faster written out: a block of them is too little work for PyTorch's
# kernel on a CPU.
LEAST_CHANNELS = 16
# Scores that are held at once where they are written out: they stay in a processor's cache.
_SCORE_BYTES = 4 << 20
# Processors multiply 8 or 16 numbers at once, and products of 30 channels take longer than of 32.
# Of wider heads they gain less than it takes to make them wider.
_MULTIPLES, _MOST_MORE, _WIDEST = (16, 8), 1.08, 96
# Of queries, keys and values that are made wider at once: they stay in a cache until they are used.
_WIDER_BYTES = 4 << 20
# Part of the windows that is done as if it were all: less is copied together first.
_NEARLY = 0.75


@dataclass(frozen=True)
class MaskPattern:
    """Windows (``places``) to whose scores something is ``added`` beside the bias; None where
    nothing is. A range is of windows beside one another, which need not be copied together."""

    places: Sequence[int]
    added: Tensor | None
    _indices: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def indices(self, device: torch.device) -> Tensor:
        """The places as a tensor, made once: no memory of the host is read while a CUDA graph
        is recorded."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.places, device=device)
        return self._indices[device]


def patterns_in_range(patterns: Sequence[MaskPattern], first: int, end: int) -> list[MaskPattern]:
    """What is left of ``patterns`` between these windows, counted from the first."""
    found = []
    for one in patterns:
        places = one.places
        if isinstance(places, range):
            left = range(max(places[0], first) - first, min(places[-1] + 1, end) - first)
        else:
            left = [place - first for place in places if first <= place < end]
        if left:
            found.append(MaskPattern(left, one.added))
    return found


def padded_head_dim(width: int) -> int:
    """The channels that a head of ``width`` is computed with on a CPU, the others zeros."""
    for multiple in _MULTIPLES:
        wide = -(-width // multiple) * multiple
        if wide <= min(_WIDEST, width * _MOST_MORE):
            return wide
    return width


def attend_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    patterns: Sequence[MaskPattern],
    scale: float,
) -> Tensor:
    """softmax(scale · Q Kᵀ + bias + pattern) V in every window.

    ``query`` is (windows, heads, places, channels), ``key`` and ``value`` may have other places;
    ``bias`` is (1, heads, places, places) and what a pattern adds (1, 1, places, places), or both
    have fewer dimensions in front. ``patterns`` tell of all windows or of none. Exact to rounding;
    no scores are kept.

    Where nearly all windows have one pattern, as of a mask of windows that are shifted round an
    image, it is taken for all, and the others are done again.
    """
    bias = None if bias is None else _four(bias)
    if not patterns:
        return _attend(query, key, value, bias, scale)
    if all(isinstance(one.places, range) for one in patterns):
        return _attend_ranges(query, key, value, bias, patterns, scale)
    usual, *others = sorted(patterns, key=lambda one: -len(one.places))
    if len(usual.places) >= _NEARLY * len(query):
        result = _attend(query, key, value, _sum(bias, usual.added), scale)
    else:
        result = _empty(query, value)
        others = [usual, *others]
    for one in others:
        places = one.indices(query.device)
        q, k, v = (each.index_select(0, places) for each in (query, key, value))
        result.index_copy_(0, places, _attend(q, k, v, _sum(bias, one.added), scale))
    return result


def _attend_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    patterns: Sequence[MaskPattern],
    scale: float,
) -> Tensor:
    """Each pattern's windows as they lie."""
    found = []
    for one in sorted(patterns, key=lambda one: one.places[0]):
        part = slice(one.places[0], one.places[-1] + 1)
        q, k, v = (each[part] for each in (query, key, value))
        found.append(_attend(q, k, v, _sum(bias, one.added), scale))
    if len(found) == 1:
        return found[0]
    return torch.cat([one.transpose(1, 2) for one in found]).transpose(1, 2)


def _empty(query: Tensor, value: Tensor) -> Tensor:
    """A result, in memory as PyTorch's kernels leave it: heads beside one another."""
    windows, heads, places = query.shape[:3]
    return query.new_empty(windows, places, heads, value.shape[-1]).transpose(1, 2)


def _sum(bias: Tensor | None, added: Tensor | None) -> Tensor | None:
    if added is None:
        return bias
    return _four(added) if bias is None else bias + _four(added)


def _four(added: Tensor) -> Tensor:
    """As many dimensions as scores have: PyTorch's fast kernels take no others."""
    return added.reshape(*(1,) * (4 - added.dim()), *added.shape[-4:])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float
) -> Tensor:
    if not _is_on_cpu(query):
        # By the backend that is best there, within the limits of its launches.
        return attention(query, key, value, added, AttentionSpec(scale))
    if query.shape[-1] < LEAST_CHANNELS:
        return _written_out(query, key, value, added, scale)
    if _gains_by_width(query, value):
        return _widened(query, key, value, added, scale)
    return F.scaled_dot_product_attention(query, key, value, added, scale=scale)


def _gains_by_width(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    plain = query.dtype == torch.float32 and not torch.is_grad_enabled()
    known = width == value.shape[-1] and not torch.compiler.is_compiling()
    return plain and known and padded_head_dim(width) > width


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float
) -> Tensor:
    """By products and a softmax, some windows at a time."""
    windows, heads, places = query.shape[:3]
    at_once = max(1, _SCORE_BYTES // (heads * places * key.shape[2] * query.itemsize))
    result = _empty(query, value)
    by_powers = supports_exp2_softmax(query, key, value, *([] if added is None else [added]))
    unit = LOG2_E if by_powers else 1.0
    for first in range(0, windows, at_once):
        part = slice(first, first + at_once)
        scores = partial(_scores, query[part], key[part], added, scale, unit)
        if by_powers:
            exp2_softmax_matmul(scores, partial(torch.matmul, other=value[part]), result[part])
        else:
            result[part] = scores().softmax(-1) @ value[part]
    return result


def _scores(query: Tensor, key: Tensor, added: Tensor | None, scale: float, unit: float) -> Tensor:
    """``unit`` times (scale · Q Kᵀ + added)."""
    scores = (query * (scale * unit)) @ key.transpose(-2, -1)
    # In place, and without a copy of what may be as large as many windows' queries.
    return scores if added is None else scores.add_(added, alpha=unit)


def _widened(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float
) -> Tensor:
    """By PyTorch's kernel, some windows at a time, which are copied with channels of zeros: these
    add nothing to scores, and their own values are left out."""
    given, width = (query, key, value), query.shape[-1]
    wide, result = padded_head_dim(width), _empty(query, value)
    window = query.shape[1] * wide * query.itemsize * sum(one.shape[2] for one in given)
    at_once = max(1, _WIDER_BYTES // window)
    held = [_zeros(one[:at_once], wide) for one in given]
    for first in range(0, len(query), at_once):
        part = slice(first, first + at_once)
        q, k, v = (room[: len(one[part])] for room, one in zip(held, given, strict=True))
        for room, one in zip((q, k, v), given, strict=True):
            room[..., :width] = one[part]
        # Not named, or there would be those of two parts.
        result[part] = F.scaled_dot_product_attention(q, k, v, added, scale=scale)[..., :width]
    return result


def _zeros(like: Tensor, wide: int) -> Tensor:
    """Of such windows, heads of a place beside one another."""
    windows, heads, places = like.shape[:3]
    return like.new_zeros(windows, places, heads, wide).transpose(1, 2)
