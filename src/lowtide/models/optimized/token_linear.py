"""Modules in a faster form: their base, linear layers over tokens, and conversions to tokens.

A convolution returns NCHW. SwinIR-like models view that as tokens whose channels have a stride of
the image's size, and residual sums keep the layout of their operands: all layers of a group then
read and write strided tokens, and every norm copies them to contiguous ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.attention.cpu_ops import onednn_linear_any_layout, to_contiguous


def is_recorded() -> bool:
    """Return whether autograd or ``torch.compile`` records what runs now.

    Then no tensor may be overwritten, or viewed as another dtype.
    """
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


class OptimizedModule(nn.Module):
    """Replacement for the module ``plain``, with its call and its state_dict keys.

    During ``torch.export`` it runs ``plain``: code that reads graphs, as streaming does, knows the
    forms that models are written in.
    """

    plain: Any

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        # Shared with plain: the same tensors under the same names, moved and cast together.
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self._modules = plain._modules
        self.training = plain.training
        # Not a submodule, or its tensors would have two names.
        self.__dict__["plain"] = plain

    @staticmethod
    def supports(part: Any) -> bool:
        """Return whether the submodules of ``part`` are of the kinds this class needs."""
        return True

    def extra_repr(self) -> str:
        """Return the class name of the replaced module."""
        return f"for {type(self.plain).__name__}"


class OptimizedLinear(OptimizedModule):
    """Replacement for ``torch.nn.Linear``, equal up to rounding."""

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Map (..., C) to (..., C'), adding ``plus`` where given."""
        if torch.compiler.is_compiling():
            return linear_add(self.plain, x, plus)
        return onednn_linear_any_layout(x, self.plain.weight, self.plain.bias, plus=plus)


def linear_add(layer: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor:
    """Compute ``layer(x) + plus``, fused where the layer supports it.

    ``x`` is (..., C). ``plus`` has the shape of the result, (..., C'), and is not changed.
    """
    if plus is None:
        return layer(x)
    return (
        layer(x, plus) if isinstance(layer, OptimizedLinear | OptimizedMlp) else layer(x).add_(plus)
    )


class OptimizedMlp(OptimizedModule):
    """Replacement for spandrel's ``Mlp(x)``, with GELU fused into the first layer.

    Of SwinIR, DRCT, HAT and CRAFT: two linear layers and GELU between them.
    """

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Map (..., C) to (..., C), adding ``plus`` where given."""
        if not self.is_known():
            return linear_add(self.plain, x, plus)
        return linear_add(self.plain.fc2, self.inner(x), plus)

    def is_known(self) -> bool:
        """Return whether `inner` computes the input of the second layer."""
        plain = self.plain
        exact = type(plain.act) is nn.GELU and plain.act.approximate == "none"
        # The first layer may not be replaced.
        plainly = type(plain.fc1) is OptimizedLinear and not plain.training
        return exact and plainly and not torch.compiler.is_compiling()

    def inner(self, x: Tensor) -> Tensor:
        """Map (..., C) to the input of the second layer."""
        first = self.plain.fc1.plain
        return onednn_linear_any_layout(x, first.weight, first.bias, gelu=True)


class OptimizedPointwiseConv(OptimizedModule):
    """Replacement for a 1×1 ``torch.nn.Conv2d`` between layers over tokens.

    PyTorch converts its input to NCHW, and the layers after it convert back to tokens. This one
    keeps the layout.
    """

    @staticmethod
    def fits(part: nn.Module) -> bool:
        """Return whether ``part`` is a 1×1 convolution, stride 1, one group, unpadded."""
        if type(part) is not nn.Conv2d or part.groups > 1 or part.padding_mode != "zeros":
            return False
        return part.kernel_size == part.stride == (1, 1) and part.padding in ((0, 0), "valid")

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        plain = self.plain
        tokens = x.movedim(-3, -1)
        by_tokens = tokens.is_contiguous() and not x.is_contiguous()
        if torch.compiler.is_compiling() or x.device.type != "cpu" or not by_tokens:
            return plain(x)
        weight = plain.weight.flatten(1)
        return onednn_linear_any_layout(tokens, weight, plain.bias).movedim(-1, -3)


class OptimizedFirstConv(OptimizedModule):
    """Replacement for the first ``torch.nn.Conv2d``, with channels-last output.

    Its output becomes the model's tokens, which then need not be held in both layouts.
    """

    @staticmethod
    def fits(part: object) -> bool:
        """Return whether ``part`` is a ``torch.nn.Conv2d``."""
        return type(part) is nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        found = self.plain(x)
        if not _arranges(x):
            return found
        tokens = to_contiguous(found.flatten(2).transpose(1, 2))
        return tokens.unflatten(1, found.shape[2:]).movedim(-1, 1)


class OptimizedPatchEmbed(OptimizedModule):
    """Replacement for ``PatchEmbed(x)`` of SwinIR-like models: contiguous tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, N, C)."""
        found = self.plain(x)
        return to_contiguous(found) if _arranges(x) else found


class OptimizedPatchUnembed(OptimizedModule):
    """Replacement for ``PatchUnEmbed(x, x_size)`` of SwinIR-like models: NCHW images.

    The next convolution then rounds as little as it does in the model: over channels-last pixels it
    adds up more values in one go.
    """

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        """Map (B, N, C) to (B, C, H, W)."""
        if not _arranges(x):
            return self.plain(x, x_size)
        return to_contiguous(x.transpose(1, 2)).unflatten(2, tuple(x_size))


def _arranges(x: Tensor) -> bool:
    """Return whether this module chooses the memory layout of its output.

    Only on a CPU: on a GPU it was not measured, and recorded or exported graphs choose layouts
    elsewhere.
    """
    return x.device.type == "cpu" and not (is_recorded() or torch.compiler.is_exporting())
