"""What every implementation of attention answers before it may run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

# What one launch of a CUDA grid takes along its second and third axis, and so batches × heads.
MOST_HEADS_ON_CUDA = 65_535


@dataclass(frozen=True)
class Missing:
    """Why an implementation cannot run here at all, and what would bring it."""

    reason: str
    fix: str = ""


class Backend(ABC):
    """One implementation on (batch, heads, tokens, head dimension).

    ``verified`` are the kinds of device on which its results were compared with the reference by
    this project; elsewhere it is *unverified* and only taken when asked for by name.
    """

    name: str
    about: str
    verified: frozenset[str] = frozenset()

    @abstractmethod
    def missing(self, device: AttentionDevice) -> Missing | None:
        """Why it cannot run on ``device``; None where it can."""

    @abstractmethod
    def refusal(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """The first thing about ``call`` that it cannot compute; None if it can do all."""

    def slower(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Why it is not taken unasked though it could be; None where nothing speaks against it."""
        return

    @abstractmethod
    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Bytes held at the peak of the forward pass beyond inputs and result, about."""

    @abstractmethod
    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """The result, (batch, heads, query tokens, value's head dimension), in query's dtype."""

    def run_described(
        self,
        call: AttentionCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        spec: AttentionSpec,
    ) -> Tensor:
        """`run` of a call that is described already, for backends that look at it again."""
        return self.run(query, key, value, mask, spec)

    def most_heads(self, device: AttentionDevice, call: AttentionCall) -> int | None:
        """Batches × heads that one launch takes; None for any number."""
        return MOST_HEADS_ON_CUDA if device.kind == "cuda" else None


def scale_of(query: Tensor, spec: AttentionSpec) -> float:
    """What the scores are multiplied by."""
    return query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
