"""Interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

# Limit of a CUDA grid along its second and third axis, and so of batches × heads per launch.
MAX_HEADS_ON_CUDA = 65_535


@dataclass(frozen=True)
class Missing:
    """Missing requirement of a backend, and the command that installs it."""

    reason: str
    fix: str = ""


class Backend(ABC):
    """One implementation of attention on (B, heads, N, head dim).

    ``verified_on`` are the kinds of device on which this project compared its results with the
    reference; elsewhere it is *unverified* and only chosen by name.
    """

    name: str
    about: str
    verified_on: frozenset[str] = frozenset()

    @abstractmethod
    def missing_requirement(self, device: AttentionDevice) -> Missing | None:
        """Return the requirement missing on ``device``, None if the backend can run."""

    @abstractmethod
    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Return the first part of ``call`` that is not supported, None if all is."""

    def not_preferred_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Return why the backend is only chosen by name, None if it is chosen by default."""
        return

    @abstractmethod
    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Estimate the forward pass's peak in bytes, beyond inputs and result."""

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


def scale_of(query: Tensor, spec: AttentionSpec) -> float:
    """Return the factor of the scores, by default 1 / √(head dim).

    ``query`` is (..., head dim).
    """
    return query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
