"""DRCT's residual dense groups (RDG) with one preallocated feature map.

Concatenating what each layer adds copies a map of the image once for every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.attention.cpu_ops import cpu_linear, onednn_linear_any_layout
from lowtide.models.optimized.swin_blocks import End, OptimizedSwinBlock, scatter_rows
from lowtide.models.optimized.token_linear import (
    OptimizedLinear,
    OptimizedMlp,
    OptimizedModule,
    OptimizedPointwiseConv,
    is_recorded,
    linear_add,
)

# The residual scale of a group's output, as in the model.
_RESIDUAL_SCALE = 0.2


class OptimizedDenseGroup(OptimizedModule):
    """Replacement for ``RDG(x, xsize)`` of spandrel's DRCT without concatenations.

    The group's input and the channels that each block adds share one map that is allocated once, so
    no block concatenates its input again. A block's full output is never held: only what the layer
    after it computes from it, a small part of its channels.

    With ``overwrites`` set, nothing else needs the input, and the output is written in place.
    """

    overwrites = False

    @staticmethod
    def supports(part: Any) -> bool:
        """Return whether all blocks of ``part`` run in chunks of windows."""
        return all(isinstance(block, OptimizedSwinBlock) for block, _ in _steps(part))

    def forward(self, x: Tensor, xsize: tuple[int, int]) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        plain = self.plain
        # Blocks run in chunks of windows only for a batch of one.
        if torch.compiler.is_exporting() or is_recorded() or plain.training or len(x) > 1:
            return plain(x, xsize)
        (*steps, (last, narrow)), channels = _steps(plain), x.shape[-1]
        seen = x.new_empty(x.shape[1], last.plain.dim)
        seen[:, :channels] = x[0]
        result = x if self.overwrites else torch.empty_like(x)
        for block, adjust in steps:
            known = block.plain.dim
            for places, _, found in block.parts(seen[:, :known], xsize, end=_end(block, adjust)):
                scatter_rows(seen[:, known : known + found.shape[-1]], places, plain.lrelu(found))
        for places, given, found in last.parts(seen, xsize, end=_end(last, narrow)):
            scatter_rows(
                result[0], places, torch.add(given[:, :channels], found, alpha=_RESIDUAL_SCALE)
            )
        return result


def _steps(group: Any) -> list[tuple[Any, Any]]:
    """Return each block of ``group`` with the layer after it."""
    return [(getattr(group, f"swin{at}"), getattr(group, f"adjust{at}")) for at in range(1, 6)]


def _end(block: OptimizedSwinBlock, layer: Any) -> End:
    """Return the end of a block fused with ``layer``, the only reader of its output.

    The block's last linear layer makes more channels than ``layer`` keeps. Their weights are
    multiplied first, in fp64, which differs by rounding and saves most of that layer's work.
    """
    mlp = block.plain.mlp
    if not _are_linear(mlp, layer):
        return lambda normed, seen: _apply_to_tokens(layer, linear_add(mlp, normed, seen))
    second, weight, bias = mlp.fc2.plain, layer.plain.weight.flatten(1), layer.plain.bias
    both = (weight.double() @ second.weight.double()).to(weight)
    if second.bias is not None:
        more = weight.double() @ second.bias.double()
        bias = (more if bias is None else more + bias).to(weight)

    def end(normed: Tensor, seen: Tensor) -> Tensor:
        return onednn_linear_any_layout(
            mlp.inner(normed), both, plus=cpu_linear(seen, weight, bias)
        )

    return end


def _are_linear(mlp: Any, layer: Any) -> bool:
    """Return whether ``layer`` directly follows the last linear layer of ``mlp``.

    Only fp32 weights qualify: in half precision the product of the weights would have to be
    rounded.
    """
    known = (
        type(layer) is OptimizedPointwiseConv and isinstance(mlp, OptimizedMlp) and mlp.is_known()
    )
    if not known or type(mlp.fc2) is not OptimizedLinear:
        return False
    weights = mlp.fc2.plain.weight, layer.plain.weight
    return all(weight.dtype == torch.float32 for weight in weights)


def _apply_to_tokens(layer: Any, tokens: Tensor) -> Tensor:
    """Apply a 1×1 convolution to tokens (N, C)."""
    image = tokens[None, :, None].movedim(-1, -3)
    return layer(image).movedim(-3, -1).reshape(len(tokens), -1)
