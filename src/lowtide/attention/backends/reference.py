"""Reference attention by its formula: slow, exact and differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.attention.backends.backend import Backend, scale_of
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec


class Reference(Backend):
    """softmax(scale · Q Kᵀ + mask) V in fp32, with all scores at once.

    In fp64 for fp64 input. All other backends are compared with it.
    """

    name = "reference"
    about = "the formula, in fp32 or fp64"
    verified_on = frozenset({"cpu", "cuda"})

    def missing_requirement(self, device: AttentionDevice) -> None:
        """Return None: it runs on any device."""
        return

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Refuse dropout, whose result depends on the generator."""
        return "there is dropout" if call.dropout else None

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count scores, masked copy and softmax, and the fp32 copies of the inputs."""
        size = max(4, call.dtype.itemsize)
        rows = call.batch * call.heads * (call.query_tokens + 2 * call.key_tokens)
        return size * (3 * call.score_count + rows * call.head_dim)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention: (B, heads, queries, value's head dim), in the query's dtype.

        Queries that see no key get zeros.
        """
        exact = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (tensor.to(exact) for tensor in (query, key, value))
        if spec.grouped:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = scale_of(query, spec) * (q @ k.transpose(-1, -2))
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        if spec.causal:
            scores = scores.masked_fill(~causal_mask(scores), -torch.inf)
        fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(fully_masked, 0).softmax(-1).masked_fill(fully_masked, 0)
        return (weights @ v).to(query.dtype)


def causal_mask(scores: Tensor) -> Tensor:
    """Return the causal mask (queries, keys): True where query i sees keys 0..i."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
