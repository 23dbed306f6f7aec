"""DRCT's groups of blocks, each of which sees what those before it added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.models.fast.part import FastPart, recorded
from lowtide.models.fast.swin import FastBlock, put

# Of a group's result before what it was given is added, as in the model.
_SHARE = 0.2


class FastDense(FastPart):
    """``RDG(x, xsize)`` of spandrel's DRCT.

    What blocks add lies beside what the group was given, in one map that is made once: none is
    put together anew for each block. Of a block's result only what the layer behind it makes of it
    is ever there for the whole image, a small part of its channels.

    Where ``overwrites`` is set, nothing else needs what it is given, and the result takes its
    place.
    """

    overwrites = False

    @staticmethod
    def takes(part: Any) -> bool:
        """Whether its blocks run part by part."""
        return all(isinstance(block, FastBlock) for block, _ in _steps(part))

    def forward(self, x: Tensor, xsize: tuple[int, int]) -> Tensor:
        """(images, pixels, channels) to the same."""
        plain = self.plain
        # Of several images blocks are not run part by part.
        if torch.compiler.is_exporting() or recorded() or plain.training or len(x) > 1:
            return plain(x, xsize)
        (*steps, (last, narrow)), channels = _steps(plain), x.shape[-1]
        seen = x.new_empty(x.shape[1], last.plain.dim)
        seen[:, :channels] = x[0]
        result = x if self.overwrites else torch.empty_like(x)
        for block, adjust in steps:
            known = block.plain.dim
            for places, _, found in block.parts(seen[:, :known], xsize):
                added = plain.lrelu(_of_tokens(adjust, found))
                put(seen[:, known : known + added.shape[-1]], places, added)
        for places, given, found in last.parts(seen, xsize):
            whole = torch.add(given[:, :channels], _of_tokens(narrow, found), alpha=_SHARE)
            put(result[0], places, whole)
        return result


def _steps(group: Any) -> list[tuple[Any, Any]]:
    """Each block and the layer behind it."""
    return [(getattr(group, f"swin{at}"), getattr(group, f"adjust{at}")) for at in range(1, 6)]


def _of_tokens(layer: Any, tokens: Tensor) -> Tensor:
    """A convolution of 1×1 pixels, of (tokens, channels)."""
    image = tokens[None, :, None].movedim(-1, -3)
    return layer(image).movedim(-3, -1).reshape(len(tokens), -1)
