"""Check that a module and the arguments of a call are of kinds that bands can be made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.core.errors import ModelError, UsageError


def require_module(module: nn.Module) -> None:
    """Raise `UsageError` unless this is a module of Python code whose weights have shapes."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"streaming takes a torch.nn.Module, not a {type(module).__name__}",
            hint="call the function in the forward of a module",
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{_title(name)} is a TorchScript module, which has no Python code to capture",
                hint="stream the module that it was made from",
            )
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise UsageError(
                f"{_title(name)} has no weights yet", hint="call the module once on an input"
            )


def require_plain_tensors(tensors: Iterable[Tensor]) -> None:
    """Raise `UsageError` unless all tensors of a call have values of their own."""
    for tensor in tensors:
        if problem := _problem(tensor):
            kind, hint = problem
            raise UsageError(f"streaming takes no {kind}", hint=hint)


def require_plain_weights(module: nn.Module) -> None:
    """Raise `ModelError` unless all weights of a module have values of their own."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, one in itertools.chain(part._parameters.items(), part._buffers.items()):
            if one is not None and (problem := _problem(one)):
                kind, hint = problem
                raise ModelError(f"{_joined(prefix, name)} of this model is a {kind}", hint=hint)
        for name, one in vars(part).items():
            if isinstance(one, torch.ScriptObject):
                raise ModelError(
                    f"{_joined(prefix, name)} of this model is packed for a quantized operator",
                    hint="take the model before it was quantized",
                )


def _problem(tensor: Tensor) -> tuple[str, str] | None:
    """Return (kind, hint) of a tensor whose values are not simply its own."""
    if tensor.is_meta or is_fake(tensor):
        kind = "meta" if tensor.is_meta else "fake"
        return f"{kind} tensor", "load values first; lowtide.estimate tells the memory without them"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"{'nested' if tensor.is_nested else 'sparse'} tensor", "make it dense first"
    if tensor.is_quantized:
        return "quantized tensor", "call its dequantize() first"
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"tensor of the type {kind}", "take it as it was before: not quantized, not sharded"
    return None


def _title(name: str) -> str:
    return name or "the model"


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
