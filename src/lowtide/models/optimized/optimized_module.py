"""A part of somebody's model, run in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_recorded() -> bool:
    """Whether what runs now is written down, for gradients or by PyTorch's compiler: nothing may be
    overwritten then, or read as numbers of another type."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


class OptimizedModule(nn.Module):
    """Stands for ``plain`` with its call, under the names of its tensors.

    While a graph is exported it runs as ``plain`` does: what reads graphs, as streaming does, knows
    the forms that models are written in.
    """

    plain: Any

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        # The same tensors under the same names, moved and cast together with this.
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self._modules = plain._modules
        self.training = plain.training
        # Not a part of this, or its tensors would have two names.
        self.__dict__["plain"] = plain

    @staticmethod
    def takes(part: Any) -> bool:
        """Whether what is in ``part`` is as this needs it."""
        return True

    def extra_repr(self) -> str:
        """What it stands for."""
        return f"for {type(self.plain).__name__}"
