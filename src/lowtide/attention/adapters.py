"""Lowtide's attention in the terms of diffusers and transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.attention.dispatch import Policy
from lowtide.attention.functional import attention
from lowtide.attention.patch import AttentionRouter, lenient_policy
from lowtide.attention.spec import AttentionSpec
from lowtide.core.errors import UsageError


class RoutedProcessor:
    """A processor of diffusers whose attention is computed by `lowtide.attention.attention`.

    ::

        unet.set_attn_processor(RoutedProcessor.of(unet, backend="chunked"))

    It wraps the processor that a layer has, so that all else that one does stays, and `calls`
    counts what ran. ``backend`` and ``policy`` are those of `lowtide.attention.use`.
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
        """A processor for each layer of a diffusers model, for its ``set_attn_processor``."""
        return {
            name: RoutedProcessor(
                one.processor if isinstance(one, RoutedProcessor) else one, backend, policy=policy
            )
            for name, one in model.attn_processors.items()
        }

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        """How often each (backend, reason why not the one asked for) ran."""
        return dict(self._router.taken)

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped processor returns."""
        self._router.enter(layer, None)
        try:
            return self.processor(layer, *args, **kwargs)
        finally:
            self._router.leave(layer)


def register_with_transformers(
    name: str = "lowtide", backend: str | None = None, *, policy: Policy | None = None
) -> None:
    """Make ``attn_implementation=name`` known to transformers, with masks as for its ``sdpa``.

    ::

        register_with_transformers()
        model.set_attn_implementation("lowtide")

    What `attention` has no field for (soft caps, sinks, paged caches, weights as output) is
    refused when a model asks for it. Raises `UsageError` without transformers.
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
        _refuse(others)
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        # A mask has causality in it, and a single query sees all that came before.
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


# What changes a result, and has no field in `AttentionSpec`.
_REFUSED = {
    "softcap": "a soft cap on scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
    "output_attentions": "attention weights as output",
}


def _refuse(others: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if others.get(name) not in (None, False):
            raise UsageError(
                f"this model needs {what}, which lowtide.attention cannot compute",
                hint='model.set_attn_implementation("eager")',
            )


def _joined(mask: Tensor | None, bias: Tensor, query: Tensor, causal: bool) -> Tensor:
    """A bias of scores and a mask as one mask of numbers."""
    if causal:
        seen = bias.new_ones(bias.shape[-2:], dtype=bias.dtype).tril() > 0
        return bias.masked_fill(~seen, float("-inf"))
    if mask is None:
        return bias
    if mask.is_floating_point():
        return bias + mask
    return bias.masked_fill(~mask, float("-inf"))
