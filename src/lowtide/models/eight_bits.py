"""Linear layers in 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowtide.core.errors import UsageError
from lowtide.core.quiet import errors_only
from lowtide.models.fast.tokens import FastLinear

# Smaller layers, of biases and gates, take no time and are all of what they compute.
_LEAST = 16
# What the tensor cores of a card take.
_CARD_STEP = 8


def quantize(network: nn.Module, device: str) -> int:
    """Compute the linear layers of ``network`` in 8 bits, in place; returns how many there are.

    Weights are rounded once, by output channel, and what a layer is given by token in each call;
    sums are exact, and everything else stays in fp32. Accuracy: approximate. Layers of fewer than
    16 channels stay as they are, and on a card those whose channels are not multiples of 8. Raises
    `UsageError` where torchao is missing or no layer is left.
    """
    layers = [
        part.plain if isinstance(part, FastLinear) else part
        for part in network.modules() if isinstance(part, (nn.Linear, FastLinear))
    ]  # fmt: skip
    chosen = {layer for layer in layers if _fits(layer, device)}
    if not chosen:
        raise UsageError(
            "this model has no linear layers that 8 bits would do for", hint="--precision fp32"
        )
    apply, scheme = torchao_parts()
    _as_written(network)
    apply(network, scheme(), filter_fn=lambda part, _: part in chosen)
    return len(chosen)


def _fits(layer: nn.Linear, device: str) -> bool:
    step = 1 if device == "cpu" else _CARD_STEP
    sides = layer.in_features, layer.out_features
    return min(sides) >= _LEAST and not any(side % step for side in sides)


def _as_written(network: nn.Module) -> None:
    """Faster forms of linear layers know fp32 weights only."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FastLinear):
                setattr(parent, name, child.plain)


def torchao_parts() -> tuple[Callable[..., None], Callable[[], object]]:
    """What applies a scheme to a network, and the scheme. Raises `UsageError` without torchao."""
    try:
        # It is told of its own dealings with PyTorch while it is imported.
        with errors_only("torch.utils._pytree"):
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise UsageError(
            "--precision int8 needs torchao", hint="pip install 'lowtide[int8]'"
        ) from error
    return quantize_, Int8DynamicActivationInt8WeightConfig
