"""Adapters of `lowtide.attention.attention` for diffusers and transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.attention.dispatch import Policy
from lowtide.attention.functional import attention
from lowtide.attention.patch import AttentionRouter, lenient_policy
from lowtide.attention.spec import AttentionSpec
from lowtide.core.errors import UsageError


class RoutedProcessor:
    """Diffusers attention processor that computes with `lowtide.attention.attention`.

    ::

        unet.set_attn_processor(RoutedProcessor.of(unet, backend="chunked"))

    It wraps the layer's own processor, so that everything else the processor does stays the same.
    `calls` counts which backends ran. ``backend`` and ``policy`` are those of
    `lowtide.attention.use`.
    """

    def __init__(
        self, processor: Any, backend: str | None = None, *, policy: Policy | None = None
    ) -> None:
        self.processor = processor
        self._router = AttentionRouter(backend, policy)

    @staticmethod
    def of(
        model: Any, backend: str | None = None, *, policy: Policy | None = None
    ) -> dict[str, RoutedProcessor]:
        """Return a processor per attention layer, for the model's ``set_attn_processor``."""
        return {
            name: RoutedProcessor(
                one.processor if isinstance(one, RoutedProcessor) else one, backend, policy=policy
            )
            for name, one in model.attn_processors.items()
        }

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        """Calls per (backend, reason why it is not the requested one; "" if it is)."""
        return dict(self._router.call_counts)

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped processor with its attention routed, and return its result."""
        self._router.enter(layer, None)
        try:
            return self.processor(layer, *args, **kwargs)
        finally:
            self._router.leave(layer)


def register_with_transformers(
    name: str = "lowtide", backend: str | None = None, *, policy: Policy | None = None
) -> None:
    """Register an ``attn_implementation`` with transformers.

    ::

        register_with_transformers()
        model.set_attn_implementation("lowtide")

    Its masks are those of ``sdpa``. What `attention` does not support (soft caps, sinks, paged
    caches, attention weights as output) raises `UsageError` when a model requests it.

    Raises:
        UsageError: transformers is not installed, or older than 4.53.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UsageError(
            "transformers is not installed, or older than 4.53",
            hint="pip install 'transformers>=4.53'",
        ) from error
    policy = lenient_policy(backend, policy)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _raise_if_unsupported(others)
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        # A mask already includes causality, and a single query sees all earlier keys.
        causal = is_causal and attention_mask is None and query.shape[2] > 1
        spec = AttentionSpec(scaling, causal, dropout, query.shape[1] != key.shape[1])
        bias = others.get("position_bias")
        mask = attention_mask if bias is None else _joined(attention_mask, bias, query, causal)
        if bias is not None and causal:
            spec = AttentionSpec(scaling, False, dropout, spec.grouped)
        found = attention(query, key, value, mask, spec, backend=backend, policy=policy)
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


# Options of transformers that change the result and have no field in `AttentionSpec`.
_UNSUPPORTED = {
    "softcap": "a soft cap on scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
    "output_attentions": "attention weights as output",
}


def _raise_if_unsupported(kwargs: dict[str, Any]) -> None:
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) not in (None, False):
            raise UsageError(
                f"this model needs {what}, which lowtide.attention cannot compute",
                hint='model.set_attn_implementation("eager")',
            )


def _joined(mask: Tensor | None, bias: Tensor, query: Tensor, causal: bool) -> Tensor:
    """Combine a bias of the scores and a mask into one additive mask."""
    if causal:
        seen = bias.new_ones(bias.shape[-2:], dtype=bias.dtype).tril() > 0
        return bias.masked_fill(~seen, float("-inf"))
    if mask is None:
        return bias
    if mask.is_floating_point():
        return bias + mask
    return bias.masked_fill(~mask, float("-inf"))
