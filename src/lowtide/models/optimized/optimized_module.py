"""Base class of modules that replace a module of a model with a faster form."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
