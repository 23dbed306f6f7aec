"""8-bit quantization of linear layers by torchao."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import UsageError
from lowtide.core.logging import silence_warnings
from lowtide.core.precision import EightBits
from lowtide.models.optimized.token_linear import OptimizedLinear

# Smaller layers, of biases and gates, take no time, and errors in them do not average out.
_LEAST = 16
# Minimum compute capability of GPUs with fp8 matrix products.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class _Scheme:
    """Quantization scheme: torchao's class, granularity, weight dtype, size multiples.

    ``weight_dtype`` is the dtype of the weights before, ``multiples`` what both sides have to be
    multiples of, on the CPU and on a GPU.
    """

    config_class: str
    by_row: bool
    weight_dtype: torch.dtype
    multiples: tuple[int, int]


_SCHEMES: dict[EightBits, _Scheme] = {
    "int8": _Scheme("Int8DynamicActivationInt8WeightConfig", False, torch.float32, (1, 8)),
    "fp8": _Scheme("Float8DynamicActivationFloat8WeightConfig", True, torch.bfloat16, (16, 16)),
}


def quantize_linear(network: nn.Module, device: str, kind: EightBits = "int8") -> int:
    """Quantize linear layers of ``network`` to 8 bits in place; returns their count.

    ``int8`` takes a network in fp32: weights are rounded once, per output channel, and activations
    per token in each call; sums are exact, and everything else stays in fp32. ``fp8`` takes one
    whose layers are in bf16 (`to_low_precision`), and rounds both to e4m3, which has three bits of
    fraction, by the same rows. Accuracy: approximate. Layers of fewer than 16 channels stay
    unquantized, and so do those whose channels are not multiples of 8 on a GPU, or of 16 in
    ``fp8``. Raises `UsageError` where torchao is missing or no layer is left.
    """
    way = _SCHEMES[kind]
    layers = [
        part.plain if isinstance(part, OptimizedLinear) else part
        for part in network.modules()
        if isinstance(part, (nn.Linear, OptimizedLinear))
    ]
    chosen = {layer for layer in layers if _fits(layer, device, way)}
    if not chosen:
        raise UsageError(
            "this model has no linear layers that can be quantized to 8 bits",
            hint="--precision fp32",
        )
    apply, scheme = torchao_scheme(kind)
    _undo_optimized_linear(network)
    apply(network, scheme(), filter_fn=lambda part, _: part in chosen)
    return len(chosen)


def _fits(layer: nn.Linear, device: str, way: _Scheme) -> bool:
    step = way.multiples[device != "cpu"]
    sides = layer.in_features, layer.out_features
    large = min(sides) >= _LEAST and not any(side % step for side in sides)
    return large and layer.weight.dtype == way.weight_dtype


def _undo_optimized_linear(network: nn.Module) -> None:
    """Undo `OptimizedLinear`, which supports plain weights only."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, OptimizedLinear):
                setattr(parent, name, child.plain)


def torchao_scheme(kind: EightBits = "int8") -> tuple[Callable[..., None], Callable[[], object]]:
    """Return torchao's ``quantize_`` and a factory of the scheme's configuration.

    Raises `UsageError` without torchao, or with one for another PyTorch.
    """
    way = _SCHEMES[kind]
    try:
        # torchao's own use of PyTorch warns during the import.
        with silence_warnings("torch.utils._pytree"):
            parts: Any = importlib.import_module("torchao.quantization")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--precision {kind} needs torchao", hint="pip install 'lowtide[int8]'"
        ) from error
    except ImportError as error:
        raise UsageError(
            f"torchao {metadata.version('torchao')} does not fit PyTorch {torch.__version__}:"
            f" {error.msg.partition(' (')[0]}",
            hint="install the torchao of this PyTorch's time; for PyTorch 2.8,"
            " pip install 'torchao==0.13.*'",
        ) from error
    make = getattr(parts, way.config_class)
    return parts.quantize_, lambda: make(granularity=parts.PerRow()) if way.by_row else make()
