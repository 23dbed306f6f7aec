"""Linear layers over many tokens, and convolutions that are such layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.attention.linear_ops import onednn_linear_any_layout
from lowtide.models.optimized.optimized_module import OptimizedModule


class OptimizedLinear(OptimizedModule):
    """``torch.nn.Linear``, with the same numbers but for rounding."""

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """(..., channels) to (..., other channels), ``plus`` what is there already."""
        if torch.compiler.is_compiling():
            return linear_add(self.plain, x, plus)
        return onednn_linear_any_layout(x, self.plain.weight, self.plain.bias, plus=plus)


def linear_add(layer: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor:
    """``layer(x)``, ``plus`` what is there already: at once by layers that can. It has the shape of
    the result and stays as it is."""
    if plus is None:
        return layer(x)
    return (
        layer(x, plus) if isinstance(layer, OptimizedLinear | OptimizedMlp) else layer(x).add_(plus)
    )


class OptimizedMlp(OptimizedModule):
    """``Mlp(x)`` of spandrel's SwinIR, DRCT, HAT and CRAFT: two linear layers and GELU between
    them, which comes with the first one's results."""

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """(..., channels) to the same, ``plus`` what is there already."""
        if not self.is_known():
            return linear_add(self.plain, x, plus)
        return linear_add(self.plain.fc2, self.inner(x), plus)

    def is_known(self) -> bool:
        """Whether `inner` gives what lies before the second layer."""
        plain = self.plain
        exact = type(plain.act) is nn.GELU and plain.act.approximate == "none"
        # A first layer may be in 8 bits, or left as it was.
        plainly = type(plain.fc1) is OptimizedLinear and not plain.training
        return exact and plainly and not torch.compiler.is_compiling()

    def inner(self, x: Tensor) -> Tensor:
        """(..., channels) to what the second layer is given."""
        first = self.plain.fc1.plain
        return onednn_linear_any_layout(x, first.weight, first.bias, gelu=True)


class OptimizedPointwiseConv(OptimizedModule):
    """A ``torch.nn.Conv2d`` of 1×1 pixels between layers over tokens.

    PyTorch brings the pixels of a channel together for it, and the layers after it bring the
    channels of a pixel together again. This leaves them where they are.
    """

    @staticmethod
    def fits(part: nn.Module) -> bool:
        """Whether ``part`` is such a convolution."""
        if type(part) is not nn.Conv2d or part.groups > 1 or part.padding_mode != "zeros":
            return False
        return part.kernel_size == part.stride == (1, 1) and part.padding in ((0, 0), "valid")

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, height, width) to as many of other channels."""
        plain = self.plain
        tokens = x.movedim(-3, -1)
        by_tokens = tokens.is_contiguous() and not x.is_contiguous()
        if torch.compiler.is_compiling() or x.device.type != "cpu" or not by_tokens:
            return plain(x)
        weight = plain.weight.flatten(1)
        return onednn_linear_any_layout(tokens, weight, plain.bias).movedim(-1, -3)
