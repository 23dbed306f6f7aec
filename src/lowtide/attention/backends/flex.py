"""Backend for PyTorch's FlexAttention, compiled (Dong et al., arXiv 2412.05496)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.backends.backend import Backend, Missing
from lowtide.attention.spec import AttentionCall, AttentionDevice, AttentionSpec

_MIN_DIM = 16


class Flex(Backend):
    """FlexAttention with masks as a ``score_mod``, compiled per shape.

    The first call for a shape takes seconds.
    """

    name = "flex"
    about = "PyTorch's FlexAttention, compiled by Triton"

    def missing_requirement(self, device: AttentionDevice) -> Missing | None:
        """Require Triton and a GPU; compiled CPU kernels are slower than sdpa-flash."""
        if device.kind != "cuda":
            return Missing("needs a CUDA device: compiled for the CPU it is slower than sdpa-flash")
        if importlib.util.find_spec("triton") is None:
            return Missing("Triton is not installed", "pip install triton")
        return None

    def unsupported_reason(self, device: AttentionDevice, call: AttentionCall) -> str | None:
        """Refuse dropout, head dims below 16 and fp64."""
        rules = (
            ("there is dropout", call.dropout > 0),
            (f"a head dimension is below {_MIN_DIM}", call.head_dim < _MIN_DIM),
            (f"the value's dimension is below {_MIN_DIM}", call.value_dim < _MIN_DIM),
            ("the dtype is fp64", call.dtype == torch.float64),
        )
        return next((reason for reason, refused in rules if refused), None)

    def workspace_bytes(self, device: AttentionDevice, call: AttentionCall) -> int:
        """Count the log-sum-exp of each query."""
        return 4 * call.batch * call.heads * call.query_tokens

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        """Compute attention: (B, heads, queries, value's head dim).

        Mask and causality are fused as a ``score_mod``.
        """
        change = None if mask is None and not spec.causal else _score_mod(query, key, mask, spec)
        return _compiled()(
            query, key, value, score_mod=change, scale=spec.scale, enable_gqa=spec.grouped
        )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _score_mod(
    query: Tensor, key: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Callable[..., Tensor]:
    """Return the ``score_mod`` that applies mask and causality to one score."""
    shape = *query.shape[:3], key.shape[2]
    whole = None if mask is None else mask.expand(shape)
    truth = whole is not None and whole.dtype == torch.bool

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if whole is not None:
            said = whole[batch, head, row, column]
            score = torch.where(said, score, -torch.inf) if truth else score + said
        return torch.where(row >= column, score, -torch.inf) if spec.causal else score

    return change
