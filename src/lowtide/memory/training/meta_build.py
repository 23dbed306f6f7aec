"""Building modules and example inputs on the meta device, without memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import ModelError, UsageError

Inputs = Callable[[int, tuple[int, int]], tuple[Any, ...]]


def build_on_meta(model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """Return a module, or a function's module, on the ``meta`` device if possible.

    Raises:
        UsageError: for None.
        ModelError: if the function returns no module.
    """
    if model is None:
        raise UsageError(
            "cannot estimate memory without a model", hint="pass model=, a module or a function"
        )
    if isinstance(model, nn.Module):
        return model
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # Loading a state dict into meta weights warns that it has no effect.
            warnings.simplefilter("ignore")
            built = model()
    except (RuntimeError, TypeError):
        # It reads a value of a tensor, or moves one, which only real tensors allow.
        built = model()
    if not isinstance(built, nn.Module):
        name = getattr(model, "__name__", repr(model))
        raise ModelError(f"{name} returned a {type(built).__name__}, not a torch.nn.Module")
    return built


def make_inputs(
    model: nn.Module, batch: int, size: tuple[int, int], inputs: Inputs | None = None
) -> tuple[Any, ...]:
    """Return inputs for ``model``: ``inputs``, its own ``example_inputs``, or images.

    Images are meta tensors (B, C, H, W), with the channels of the first convolution. ``size`` is
    (height, width).

    Raises:
        UsageError: for a model that has neither.
    """
    make = inputs or getattr(model, "example_inputs", None)
    if make is not None:
        made = make(batch, size)
        return tuple(made) if isinstance(made, tuple | list) else (made,)
    return (torch.empty(batch, image_channels(model), *size, device="meta"),)


def image_channels(model: nn.Module) -> int:
    """Return the input channels of the first convolution of ``model``.

    Raises:
        UsageError: if it has none.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return part.in_channels
    raise UsageError(
        f"{type(model).__name__} has no convolution to infer its input channels from",
        hint="add a method example_inputs(batch, (height, width)), or pass inputs=",
    )
