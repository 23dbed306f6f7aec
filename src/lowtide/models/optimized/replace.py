"""Replacement of modules in a spandrel model by faster ones, each verified first.

DRCT, HAT and SwinIR take 0.44 to 0.57 of the time of spandrel's own modules.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.trace_cache import cached_in_trace
from lowtide.models.optimized.dense_group import OptimizedDenseGroup
from lowtide.models.optimized.narrow_conv import DeferredLayers, OptimizedNarrowConv, OptimizedTail
from lowtide.models.optimized.shift_mask import ShiftMask
from lowtide.models.optimized.swin_blocks import (
    OptimizedOverlapAttention,
    OptimizedRectangleAttention,
    OptimizedSwinBlock,
    OptimizedWindowAttention,
)
from lowtide.models.optimized.token_linear import (
    OptimizedFirstConv,
    OptimizedLinear,
    OptimizedMlp,
    OptimizedModule,
    OptimizedPatchEmbed,
    OptimizedPatchUnembed,
    OptimizedPointwiseConv,
)

# Relative to the largest value; fp32 rounding is a tenth of it.
_TOLERANCE = 1e-5
# Rows of a strip when the tail is verified.
_ROWS = 8
_DROPPED = re.compile(r"DropPath\(.*?\)")
_HOME = "spandrel.architectures."
# Models whose ``upsample`` of convolutions and pixel shuffles is followed by ``conv_last`` alone.
_TAIL_MODELS = {f"{name} {name}" for name in ("SwinIR", "DRCT", "HAT", "DAT", "RGT", "ATD", "GRL")}


def replace_modules(network: nn.Module) -> Counter[str]:
    """Replace modules of a spandrel ``network`` by faster ones, in place.

    Replaced are window attention and the blocks around it, linear layers, convolutions that are 1×1
    or have few output channels, conversions between images and tokens, and the last layers. Window
    attention is known of SwinIR, DRCT, HAT and CRAFT. Modules of one form are replaced only if the
    first of them returns the original's output on random windows, and masks of shifted windows only
    if they equal the model's own.

    Returns:
        How many modules were replaced, by kind.
    """
    found: Counter[str] = Counter()
    agreed: dict[object, bool] = {}
    # Children before their parents, which are verified with replaced children.
    for parent in reversed(list(network.modules())):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, OptimizedLinear(child))
                found["Linear"] += 1
            if OptimizedPointwiseConv.fits(child):
                setattr(parent, name, OptimizedPointwiseConv(child))
                found["Conv2d 1×1"] += 1
            if (title := _name(child)) not in _KINDS:
                continue
            kind, example = _KINDS[title]
            if not kind.supports(child):
                continue
            fast, form = kind(child), (title, _form(child))
            if form not in agreed:
                agreed[form] = _gives_same_output(child, fast, example)
            if agreed[form]:
                setattr(parent, name, fast)
                found[title] += 1
        _allow_overwriting(parent)
    for part in network.modules():
        # A replaced block still runs its original for batches of several images.
        part = part.plain if isinstance(part, OptimizedSwinBlock) else part
        if callable(getattr(part, "calculate_mask", None)) and _supports_shift_masks(part):
            _use_shift_masks(part)
    if any(isinstance(part, OptimizedPatchUnembed) for part in network.modules()):
        first: Any = getattr(network, "conv_first", None)
        if OptimizedFirstConv.fits(first):
            network.conv_first = OptimizedFirstConv(first)
            found["first"] += 1
    if _name(network) in _TAIL_MODELS and _replace_tail(network):
        found["tail"] += 1
    # After the tail, which holds its own convolutions.
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if OptimizedNarrowConv.fits(child):
                setattr(parent, name, OptimizedNarrowConv(child))
                found["Conv2d to few channels"] += 1
    return found


def _allow_overwriting(group: Any) -> None:
    """Set ``overwrites`` on blocks of a group, or groups of a model, in a row.

    Set on all that alone need their input: all but the first, whose input is added to the result.
    """
    title, blocks = _name(group), []
    if title == "SwinIR BasicLayer" and not group.use_checkpoint:
        blocks = group.blocks
    elif title == "DRCT DRCT":
        blocks = group.layers
    for block in list(blocks)[1:]:
        if isinstance(block, OptimizedSwinBlock | OptimizedDenseGroup):
            block.overwrites = True


@torch.inference_mode()
def _replace_tail(network: Any) -> bool:
    """Replace ``upsample`` and ``conv_last`` by an `OptimizedTail` if it verifies."""
    before: Any = getattr(network, "upsample", None)
    last: Any = getattr(network, "conv_last", None)
    if type(before).__name__ != "Upsample" or not OptimizedTail.fits(before, last):
        return False
    tail, image = OptimizedTail(last, before), _random(1, before[0].in_channels, 2 * _ROWS + 3, 12)
    if not _same(last(before(image)), tail.in_strips(image, _ROWS)):
        return False
    network.upsample, network.conv_last = DeferredLayers(before), tail
    return True


def _name(part: nn.Module) -> str:
    """Return family and class of a spandrel module, "" for other modules."""
    kind = type(part)
    if not kind.__module__.startswith(_HOME):
        return ""
    return f"{kind.__module__.removeprefix(_HOME).split('.')[0]} {kind.__name__}"


def _form(part: nn.Module) -> str:
    """Return a key of kinds and sizes of all layers, with DropPath rates ignored."""
    return _DROPPED.sub("Identity()", repr(part))


@torch.inference_mode()
def _gives_same_output(
    plain: nn.Module, fast: OptimizedModule, example: Callable[[Any], dict[str, Any]]
) -> bool:
    given = example(plain)
    return _same(plain(**given), fast(**given))


def _same(expected: Tensor, result: Tensor) -> bool:
    apart = (result - expected).abs().max()
    # Written so that NaN fails the comparison.
    return result.shape == expected.shape and bool(apart <= _TOLERANCE * expected.abs().max())


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _swin(plain: Any) -> dict[str, Any]:
    return {"x": _random(3, plain.window_size[0] * plain.window_size[1], plain.dim)}


def _hat(plain: Any) -> dict[str, Any]:
    given = _swin(plain)
    places, table = given["x"].shape[1], len(plain.relative_position_bias_table)
    return {**given, "rpi": torch.arange(places**2).view(places, places) % table}


def _overlap(plain: Any) -> dict[str, Any]:
    side, table = plain.window_size, len(plain.relative_position_bias_table)
    seen = plain.overlap_win_size**2
    index = torch.arange(side**2 * seen).view(side**2, seen) % table
    size = 2 * side, 3 * side
    return {"x": _random(1, size[0] * size[1], plain.dim), "x_size": size, "rpi": index}


def _rectangles(plain: Any) -> dict[str, Any]:
    down, across = plain.H_sp, plain.W_sp
    places = down * across
    size = 2 * down, 3 * across
    return {
        "qkv": _random(3, 1, size[0] * size[1], plain.dim),
        "H": size[0],
        "W": size[1],
        "rpi": torch.arange(places**2).view(places, places) % 7,
        "rpe_biases": _random(7, 2),
    }


def _embed(plain: Any) -> dict[str, Any]:
    return {"x": _random(1, plain.embed_dim, 3, 5)}


def _unembed(plain: Any) -> dict[str, Any]:
    return {"x": _random(1, 15, plain.embed_dim), "x_size": (3, 5)}


def _mlp(plain: Any) -> dict[str, Any]:
    return {"x": _random(3, 16, plain.fc1.weight.shape[1])}


def _dense(plain: Any) -> dict[str, Any]:
    given = _block(plain.swin1.plain)
    return {"x": given["x"], "xsize": given["x_size"]}


def _block(plain: Any) -> dict[str, Any]:
    size = 2 * plain.window_size, 3 * plain.window_size
    return {"x": _random(1, size[0] * size[1], plain.dim), "x_size": size}


# Families whose images and tokens hold the same values in another order.
_EMBEDS = ("SwinIR", "DRCT", "HAT")
_KINDS: dict[str, tuple[type[OptimizedModule], Callable[[Any], dict[str, Any]]]] = {
    "SwinIR WindowAttention": (OptimizedWindowAttention, _swin),
    "DRCT WindowAttention": (OptimizedWindowAttention, _swin),
    "SwinIR SwinTransformerBlock": (OptimizedSwinBlock, _block),
    "DRCT SwinTransformerBlock": (OptimizedSwinBlock, _block),
    "DRCT RDG": (OptimizedDenseGroup, _dense),
    "HAT WindowAttention": (OptimizedWindowAttention, _hat),
    "HAT OCAB": (OptimizedOverlapAttention, _overlap),
    "CRAFT Attention_regular": (OptimizedRectangleAttention, _rectangles),
    **{f"{family} Mlp": (OptimizedMlp, _mlp) for family in ("SwinIR", "DRCT", "HAT", "CRAFT")},
    **{f"{family} PatchEmbed": (OptimizedPatchEmbed, _embed) for family in _EMBEDS},
    **{f"{family} PatchUnEmbed": (OptimizedPatchUnembed, _unembed) for family in _EMBEDS},
}


def _supports_shift_masks(part: nn.Module) -> bool:
    """Return whether all window attention in ``part`` takes a `ShiftMask`."""
    inside = [one for one in part.modules() if one is not part]
    fast = any(isinstance(one, OptimizedWindowAttention) for one in inside)
    return fast and all(_name(one) not in _KINDS for one in inside)


# Cached, since all blocks of an image share it.
_mask = functools.lru_cache(maxsize=8)(ShiftMask)


def _use_shift_masks(part: Any) -> None:
    """Let ``part`` make `ShiftMask`s in place of mask tensors, if they are equal."""
    plain, window, shift = part.calculate_mask, part.window_size, part.shift_size

    def few(x_size: tuple[int, int], *more: Any, **named: Any) -> ShiftMask | Tensor:
        if torch.compiler.is_exporting():
            # Masks would be most of the graph of a deep model.
            key = (*x_size, window, shift, *more, *named.values())
            return cached_in_trace(key, lambda: plain(x_size, *more, **named))
        return _mask(*x_size, window, shift)

    more = (torch.float32,) if "dtype" in plain.__code__.co_varnames else ()
    for size in ((window, window), (3 * window, 2 * window), (window, 2 * window)):
        expected = plain(size, *more)
        if not torch.equal(ShiftMask(*size, window, shift).dense(expected), expected):
            return
    part.calculate_mask = few
    # free the mask that was built for one size, as large as all others
    part.input_resolution = None
