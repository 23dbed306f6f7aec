"""Building modules and example inputs on the meta device, without memory."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.option import MOST_COUNT
from lowtide.core.units import TIB, format_bytes
from lowtide.memory.tracing.python_places import PythonStatePlaces

Inputs = Callable[[int, tuple[int, int]], tuple[Any, ...]]
# Of inputs: with what a network makes of them, sizes stay below 64 bits.
_MOST_BYTES = TIB
_SHAPE = re.compile(r"([^:]*)(?::(\w+))?")
_SIDE = re.compile(r"([hw])(?:/(\d+))?|(\d+)")


def build_on_meta(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a module, or a function's module, on the ``meta`` device if possible.

    Raises:
        ModelError: if the function returns no module.
    """
    if isinstance(model, nn.Module):
        return model
    try:
        with PythonStatePlaces(model).kept(), torch.device("meta"), warnings.catch_warnings():
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
        UsageError: for a model that has neither, and for inputs that no device holds.
    """
    make = inputs or getattr(model, "example_inputs", None) or image_inputs(image_channels(model))
    try:
        made = make(batch, size)
        made = tuple(made) if isinstance(made, tuple | list) else (made,)
        taken = sum(one.nbytes for one in made if isinstance(one, Tensor))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        taken, made = 2**63, ()
    if taken > _MOST_BYTES:
        height, width = size
        raise UsageError(
            f"{batch:,} inputs of {width:,}×{height:,} take more than {format_bytes(_MOST_BYTES)},"
            " which no device has",
            hint="a smaller --batch, --size or --input",
        )
    return made


def image_inputs(channels: int) -> Inputs:
    """Return a function that makes data-free images (B, C, H, W) of these channels."""
    return lambda batch, size: (torch.empty(batch, channels, *size, device="meta"),)


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


def parse_inputs(shapes: tuple[str, ...]) -> Inputs:
    """Return a function that makes data-free inputs for a batch size and (H, W).

    A shape lists the dimensions after the batch, separated by commas: integers, ``h`` and ``w`` for
    the image's height and width, ``h/8`` for an eighth of it. A dtype may follow a colon:
    ``"4,h/8,w/8"``, ``"77,768"``, ``":int64"`` (one value per image).

    Raises:
        UsageError: A shape has another form.
    """
    parsed = [_parse_shape(text) for text in shapes]

    def make(batch: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
        sides = dict(zip("hw", size, strict=True))
        return tuple(
            torch.empty(
                batch,
                *(side if isinstance(side, int) else sides[side[0]] // side[1] for side in shape),
                dtype=dtype,
                device="meta",
            )
            for shape, dtype in parsed
        )

    return make


def _parse_shape(text: str) -> tuple[list[int | tuple[str, int]], torch.dtype]:
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    sides = [_SIDE.fullmatch(part) for part in match[1].split(",") if match[1]] if match else []
    wrong = None in sides or any(s and (s[2] == "0" or int(s[3] or 0) > MOST_COUNT) for s in sides)
    if not isinstance(dtype, torch.dtype) or wrong:
        raise UsageError(
            f"input {text!r} is not a shape",
            hint="dimensions without the batch, h and w for the size: 3,h,w or 4,h/8,w/8 or :int64",
        )
    return [(s[1], int(s[2] or 1)) if s[1] else int(s[3]) for s in sides if s], dtype
