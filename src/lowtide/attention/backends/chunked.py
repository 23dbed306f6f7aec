"""Memory-efficient attention over blocks of scores, on any device.

By an online softmax, that of Milakov and Gimelshein (arXiv 1805.02867). Memory that does not grow
with the number of scores follows Rabe and Staats (arXiv 2112.05682), the backward pass from each
row's log-sum-exp FlashAttention (arXiv 2205.14135). Unlike PyTorch's fused kernels it supports
biases that are trained, fp64, and values of another head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.backends.backend import AttentionBackend, score_scale
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

# Scores per block: 4 MiB in fp32, which fit a CPU's last-level cache.
SCORES_PER_BLOCK = 1 << 20
_KEYS = 1024


class ChunkedBackend(AttentionBackend):
    """Online softmax over blocks of ``scores`` scores in fp32 (fp64 for fp64 input)."""

    name = "chunked"
    about = "blocks of scores with an online softmax; also for trained biases"
    verified_on = frozenset({"cpu"})

    def __init__(self, scores: int = SCORES_PER_BLOCK) -> None:
        self._scores = scores

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse dropout and shared key heads."""
        return (
            ("there is dropout", call.dropout > 0),
            ("several query heads share a key head", call.is_grouped),
        )

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count two blocks of scores, their rows, and the log-sum-exp of each query."""
        size = max(4, call.dtype.itemsize)
        block = ChunkSize.of(
            call.batch, call.heads, call.query_tokens, call.key_tokens, self._scores
        )
        heads = block.batches * call.heads
        beside = (2 * block.queries + block.keys) * (call.head_dim + call.value_dim)
        sums = call.batch * call.heads * call.query_tokens
        return size * (heads * (2 * block.queries * block.keys + beside) + sums)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention: (B, heads, queries, value's head dim).

        Queries that see no key get zeros. Differentiable with respect to a floating-point mask,
        too. Exact up to rounding.
        """
        batch, heads, queries, _ = query.shape
        block = ChunkSize.of(batch, heads, queries, key.shape[2], self._scores)
        return _Chunked.apply(query, key, value, mask, score_scale(query, spec), spec.causal, block)


@dataclass(frozen=True)
class ChunkSize:
    """Batches, queries and keys per block; heads are never split."""

    batches: int
    queries: int
    keys: int

    @staticmethod
    def of(batch: int, heads: int, queries: int, keys: int, max_scores: int) -> ChunkSize:
        """Choose the largest block of keys, queries, then batches within ``max_scores``."""
        wide = max(1, min(keys, _KEYS))
        high = max(1, min(queries, max_scores // max(1, heads * wide)))
        return ChunkSize(max(1, min(batch, max_scores // max(1, heads * wide * high))), high, wide)


class _Chunked(torch.autograd.Function):
    """Autograd function that saves the log-sum-exp and recomputes scores in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
        block: ChunkSize,
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        result = query.new_empty(*query.shape[:3], value.shape[-1])
        sums = query.new_empty(query.shape[:3], dtype=exact)
        for batch in _spans(len(query), block.batches):
            part = _of_batch(mask, batch)
            for rows in _spans(query.shape[2], block.queries):
                piece = query[batch, :, rows].to(exact) * scale
                found, logs = _attend(piece, key[batch], value[batch], part, rows, causal, block)
                result[batch, :, rows], sums[batch, :, rows] = found.to(result.dtype), logs
        ctx.save_for_backward(query, key, value, mask, result, sums)
        ctx.settings = scale, causal, block
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mask, result, sums = ctx.saved_tensors
        scale, causal, block = ctx.settings
        exact = sums.dtype
        wanted = query, key, value, *([mask] if ctx.needs_input_grad[3] else [])
        found = [torch.zeros_like(tensor, dtype=exact) for tensor in wanted]
        for batch in _spans(len(query), block.batches):
            part = _of_batch(mask, batch)
            parts = [tensor[batch] for tensor in found[:3]]
            parts += [_of_batch(tensor, batch) for tensor in found[3:]]
            for rows in _spans(query.shape[2], block.queries):
                grad_output = gradient[batch, :, rows].to(exact)
                piece = query[batch, :, rows].to(exact) * scale
                share = (grad_output * result[batch, :, rows].to(exact)).sum(-1, keepdim=True)
                logs = sums[batch, :, rows, None]
                for columns in _key_blocks(key.shape[2], block.keys, rows, causal):
                    keys = key[batch, :, columns].to(exact)
                    weights = _scores(piece, keys, part, rows, columns, causal)
                    weights.sub_(logs.masked_fill(logs == -torch.inf, 0)).exp_()
                    parts[2][:, :, columns] += weights.mT @ grad_output
                    seen = value[batch, :, columns].to(exact)
                    grad_scores = (grad_output @ seen.mT).sub_(share).mul_(weights)
                    parts[0][:, :, rows] += grad_scores @ keys * scale
                    parts[1][:, :, columns] += grad_scores.mT @ piece
                    for grad_mask in parts[3:]:
                        _add_reduced(grad_mask, grad_scores, rows, columns)
        of_inputs = [g.to(t.dtype) for g, t in zip(found, wanted, strict=True)]
        return *of_inputs[:3], (of_inputs[3:] or [None])[0], None, None, None


def _attend(
    scaled_query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: slice,
    causal: bool,
    block: ChunkSize,
) -> tuple[Tensor, Tensor]:
    """Return (result, log-sum-exp) of the scaled queries ``scaled_query``."""
    row_max = scaled_query.new_full(scaled_query.shape[:3], -torch.inf)
    total = torch.zeros_like(row_max)
    weighted_values = scaled_query.new_zeros(*scaled_query.shape[:3], value.shape[-1])
    for columns in _key_blocks(key.shape[2], block.keys, rows, causal):
        keys, values = (t[:, :, columns].to(scaled_query.dtype) for t in (key, value))
        scores = _scores(scaled_query, keys, mask, rows, columns, causal)
        new = torch.maximum(row_max, scores.amax(-1))
        finite_max = new.masked_fill(new == -torch.inf, 0)  # rows that have seen no key yet
        weights = scores.sub_(finite_max[..., None]).exp_()
        rescale = (row_max - finite_max).exp_()
        total.mul_(rescale).add_(weights.sum(-1))
        weighted_values.mul_(rescale[..., None]).add_(weights @ values)
        row_max = new
    divisor = total.masked_fill(total == 0, 1)
    return weighted_values.div_(divisor[..., None]), row_max + divisor.log()


def _of_batch(mask: Any, batch: slice) -> Any:
    """Slice a mask along its batch dimension, unless that has size 1."""
    return mask if mask is None or len(mask) == 1 else mask[batch]


def _spans(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _key_blocks(length: int, step: int, rows: slice, causal: bool) -> Iterator[slice]:
    """Yield blocks of the keys that any of these queries may see."""
    yield from _spans(min(length, rows.stop) if causal else length, step)


def _scores(
    scaled_query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    rows: slice,
    columns: slice,
    causal: bool,
) -> Tensor:
    """Compute the masked scores of one block of the scaled queries ``scaled_query``."""
    scores = scaled_query @ keys.mT
    if mask is not None:
        part = _part(mask, rows, columns)
        if mask.dtype == torch.bool:
            scores.masked_fill_(~part, -torch.inf)
        else:
            scores.add_(part)
    if causal and columns.stop > rows.start + 1:
        first = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores.masked_fill_(
            first < torch.arange(columns.start, columns.stop, device=scores.device), -torch.inf
        )
    return scores


def _part(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Slice one block of a mask along its dimensions larger than 1."""
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., columns] if mask.shape[-1] > 1 else mask


def _add_reduced(grad_mask: Tensor, grad_scores: Tensor, rows: slice, columns: slice) -> None:
    """Add a block's gradient to that of the mask, summed over broadcast dims."""
    part = _part(grad_mask, rows, columns)
    shared = [dim for dim in range(4) if part.shape[dim] == 1 and grad_scores.shape[dim] != 1]
    part += grad_scores.sum(shared, keepdim=True) if shared else grad_scores
