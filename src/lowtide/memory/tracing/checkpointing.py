"""Activation checkpointing of any module: recompute in the backward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowtide.core.errors import UsageError

Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")

# Operators whose recomputation costs most time per byte of kept result.
_SELECTIVE_SAVED_OPERATORS = [
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
_MIN_CHAIN_LENGTH = 4

Call = Callable[..., Any]


@contextmanager
def checkpointed(model: nn.Module, mode: Checkpointing) -> Iterator[nn.Module]:
    """Context in which the blocks of ``model`` recompute; gradients stay the same.

    ``full`` keeps only the input of each block (Chen et al., arXiv:1604.06174); ``selective``
    also keeps the results of convolutions and attention. Blocks are found by
    `repeated_blocks`; in a model without any, its longest chain of layers is divided into
    about √n parts.

    Raises:
        UsageError: The model has neither blocks nor a chain of layers.
    """
    if mode not in CHECKPOINTING:
        raise UsageError(
            f"gradient checkpointing {mode!r} is not known",
            hint=f"one of {', '.join(CHECKPOINTING)}",
        )
    if mode == "none":
        yield model
        return
    changed: list[nn.Module] = []
    try:
        for module, forward in _checkpointed_forwards(model, _checkpoint_wrapper(mode)):
            module.forward = forward
            changed.append(module)
        yield model
    finally:
        for module in changed:
            del (
                module.forward
            )  # the instance's attribute, so that the class's method is visible again


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model.

    They are the members of its outermost lists of two or more composite modules. A list of lists
    has the members of all of them, if only one.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        members = [member for member in _members(child) if any(member.children())]
        fewest = 1 if any(isinstance(one, nn.ModuleList) for one in child.children()) else 2
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) >= fewest:
            blocks.extend(members)
        else:
            blocks.extend(repeated_blocks(child))
    return blocks


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and instead of lists in a list theirs: no list has a pass."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and isinstance(child, nn.ModuleList):
            yield from _members(child)
        else:
            yield child


def _checkpointed_forwards(
    model: nn.Module, recompute: Callable[[Call], Call]
) -> Iterator[tuple[nn.Module, Call]]:
    """Yield (module, its checkpointed forward) for every module that changes."""
    if blocks := repeated_blocks(model):
        for block in blocks:
            yield block, recompute(block.forward)
        return
    chains = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    longest = max(chains, key=len, default=nn.Sequential())
    if len(longest) < _MIN_CHAIN_LENGTH:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks and no chain of layers to checkpoint",
            hint="checkpoint inside the model, or train without checkpointing",
        )
    layers, step = list(longest), math.ceil(math.sqrt(len(longest)))
    starts = range(0, len(layers), step)
    parts = [recompute(nn.Sequential(*layers[at : at + step])) for at in starts]
    yield longest, functools.partial(_run_sequentially, parts)


def _run_sequentially(parts: list[Call], value: Any) -> Any:
    for part in parts:
        value = part(value)
    return value


def _checkpoint_wrapper(mode: Checkpointing) -> Callable[[Call], Call]:
    extra: dict[str, Any] = {}
    if mode == "selective":
        extra["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _SELECTIVE_SAVED_OPERATORS
        )

    def recompute(forward: Call) -> Call:
        def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

        return checkpointed_forward

    return recompute
