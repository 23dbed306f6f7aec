"""Interface of attention backends, and the reference that all others are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

# Limit of a CUDA grid along its second and third axis, and so of batches × heads per launch.
MAX_HEADS_ON_CUDA = 65_535


@dataclass(frozen=True)
class MissingRequirement:
    """Missing requirement of a backend, and the command that installs it."""

    reason: str
    fix: str = ""


class AttentionBackend(ABC):
    """One implementation of attention on (B, heads, N, head dim).

    ``verified_on`` are the kinds of device on which this project compared its results with the
    reference; elsewhere it is *unverified* and only chosen by name.
    """

    name: str
    about: str
    verified_on: frozenset[str] = frozenset()

    def missing_requirement(self, device: AttentionDevice) -> MissingRequirement | None:
        """Return the requirement missing on ``device``, None if the backend can run."""
        return

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Return what the backend does not support, and whether ``call`` has it."""
        return ()

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Return the first part of ``call`` that is not supported, None if all is."""
        return next((reason for reason, refused in self.refusals(call) if refused), None)

    def not_preferred_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Return why the backend is only chosen by name, None if it is chosen by default."""
        return

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Estimate the forward pass's peak in bytes, beyond inputs and result.

        Fused kernels hold the log-sum-exp of each query.
        """
        return 4 * call.batch * call.heads * call.query_tokens

    @abstractmethod
    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention of 4-dimensional tensors.

        Args:
            query: (B, heads, queries, head dim), in floating point.
            key: (B, key heads, keys, head dim); fewer heads than ``query`` only with
                ``spec.grouped``.
            value: (B, key heads, keys, value's head dim).
            mask: broadcastable to (B, heads, queries, keys), with 2 or 4 dimensions; boolean, True
                where a query sees a key, or floating point, added to the scores.
            spec: scale, causality, dropout and grouped heads.

        Returns:
            (B, heads, queries, value's head dim) in the query's dtype.
        """

    def run_with_call(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """Compute `run`, (B, heads, queries, value's head dim), with the call described.

        For backends that would otherwise describe the call again.
        """
        return self.run(query, key, value, mask, spec)

    def max_heads(self, device: AttentionDevice, call: AttentionCall) -> int | None:
        """Return the most batches × heads per launch, None for no limit."""
        return MAX_HEADS_ON_CUDA if device.kind == "cuda" else None


def score_scale(query: Tensor, spec: AttentionSpec) -> float:
    """Return the factor of the scores, by default 1 / √(head dim).

    ``query`` is (..., head dim).
    """
    return query.shape[-1] ** -0.5 if spec.scale is None else spec.scale


class ReferenceBackend(AttentionBackend):
    """softmax(scale · Q Kᵀ + mask) V in fp32, with all scores at once.

    In fp64 for fp64 input. All other backends are compared with it.
    """

    name = "reference"
    about = "the formula, in fp32 or fp64"
    verified_on = frozenset({"cpu", "cuda"})

    def refusals(self, call: AttentionCall) -> Iterable[tuple[str, bool]]:
        """Refuse dropout, whose result depends on the generator."""
        return (("there is dropout", call.dropout > 0),)

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
        scores = score_scale(query, spec) * (q @ k.transpose(-1, -2))
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
