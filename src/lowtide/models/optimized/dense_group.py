"""DRCT's groups of blocks, each of which sees what those before it added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.attention.linear_ops import linear, onednn_linear_any_layout
from lowtide.models.optimized.optimized_module import OptimizedModule, is_recorded
from lowtide.models.optimized.swin_blocks import End, OptimizedSwinBlock, scatter_rows
from lowtide.models.optimized.token_linear import (
    OptimizedLinear,
    OptimizedMlp,
    OptimizedPointwiseConv,
    linear_add,
)

# Of a group's result before what it was given is added, as in the model.
_SHARE = 0.2


class OptimizedDenseGroup(OptimizedModule):
    """``RDG(x, xsize)`` of spandrel's DRCT.

    What blocks add lies beside what the group was given, in one map that is made once: none is
    put together anew for each block. Of a block's result only what the layer behind it makes of it
    is ever there, a small part of its channels.

    Where ``overwrites`` is set, nothing else needs what it is given, and the result takes its
    place.
    """

    overwrites = False

    @staticmethod
    def takes(part: Any) -> bool:
        """Whether its blocks run part by part."""
        return all(isinstance(block, OptimizedSwinBlock) for block, _ in _steps(part))

    def forward(self, x: Tensor, xsize: tuple[int, int]) -> Tensor:
        """(images, pixels, channels) to the same."""
        plain = self.plain
        # Of several images blocks are not run part by part.
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
            scatter_rows(result[0], places, torch.add(given[:, :channels], found, alpha=_SHARE))
        return result


def _steps(group: Any) -> list[tuple[Any, Any]]:
    """Each block and the layer behind it."""
    return [(getattr(group, f"swin{at}"), getattr(group, f"adjust{at}")) for at in range(1, 6)]


def _end(block: OptimizedSwinBlock, layer: Any) -> End:
    """The end of a block and the ``layer`` behind it, which alone sees the block's result.

    The block's last linear layer makes more channels than ``layer`` leaves of them. Their weights
    are multiplied first, in fp64, which differs by rounding and saves most of that layer's work.
    """
    mlp = block.plain.mlp
    if not _are_linear(mlp, layer):
        return lambda normed, seen: _of_tokens(layer, linear_add(mlp, normed, seen))
    second, weight, bias = mlp.fc2.plain, layer.plain.weight.flatten(1), layer.plain.bias
    both = (weight.double() @ second.weight.double()).to(weight)
    if second.bias is not None:
        more = weight.double() @ second.bias.double()
        bias = (more if bias is None else more + bias).to(weight)

    def end(normed: Tensor, seen: Tensor) -> Tensor:
        return onednn_linear_any_layout(mlp.inner(normed), both, plus=linear(seen, weight, bias))

    return end


def _are_linear(mlp: Any, layer: Any) -> bool:
    """Whether what ends in ``mlp`` and goes on in ``layer`` has nothing between. In half precision
    the weights' product would have to be rounded."""
    known = (
        type(layer) is OptimizedPointwiseConv and isinstance(mlp, OptimizedMlp) and mlp.is_known()
    )
    if not known or type(mlp.fc2) is not OptimizedLinear:
        return False
    weights = mlp.fc2.plain.weight, layer.plain.weight
    return all(weight.dtype == torch.float32 for weight in weights)


def _of_tokens(layer: Any, tokens: Tensor) -> Tensor:
    """A convolution of 1×1 pixels, of (tokens, channels)."""
    image = tokens[None, :, None].movedim(-1, -3)
    return layer(image).movedim(-3, -1).reshape(len(tokens), -1)
