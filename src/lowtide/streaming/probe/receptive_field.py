"""Receptive field of a model, measured by the spread of NaN through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.streaming.tiles.grid import round_up, split_axis
from lowtide.streaming.tiles.network import Forward

RECEPTIVE_FIELD_SIDES = (64, 192)
_PHASES = 4
_LARGE = 16.0
# Allowed rounding error between a tile and the whole; true leakage is far larger.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ReceptiveField:
    """Radius of a model's receptive field in input pixels, the larger of both axes.

    ``radius`` is None when no bound was found up to ``search_limit`` pixels: the model depends on
    the whole image (global pooling or attention), or on more than is practical for tiles.
    """

    radius: int | None
    search_limit: int

    @property
    def overlap(self) -> int | None:
        """Overlap in pixels with which tiles give the result of the whole image.

        None if the receptive field has no bound.
        """
        return None if self.radius is None else 2 * self.radius


@torch.inference_mode()
def measure_receptive_field(
    forward: Forward,
    *,
    channels: int,
    scale: int,
    align: int,
    minimum: int,
    device: str = "cpu",
    sides: Sequence[int] = RECEPTIVE_FIELD_SIDES,
    propagates_nan: bool = True,
) -> ReceptiveField:
    """Measure how many input pixels beyond its own place an output pixel depends on.

    NaN is put on one side of a line through a random input; every output that becomes NaN depends
    on that side. NaN passes wherever a value could, also where that value happens to be zero or
    masked, so the answer is an upper bound. Lines are on the ``align`` grid, as tile borders are.
    What NaN cannot show (sizes and positions that a model computes with) is found by comparing
    tiles with the whole; a model that differs counts as unbounded.

    Args:
        forward: The model, on (B, C, H, W).
        channels: Input channels.
        scale: Output pixels per input pixel.
        align: Grid of the lines, in pixels.
        minimum: Smallest side that the model accepts.
        device: Device of the inputs.
        sides: Sides of the inputs to try, smallest first: a receptive field shows on an input more
            than twice as large.
        propagates_nan: False for operators that are not PyTorch's, some of which (maximum, for
            example) may drop NaN. Each line is then tried with large values too, and any output
            that changes at all depends on them. So it is where no NaN arrives.
    """
    generator = torch.Generator().manual_seed(0)
    least = round_up(max(sides[0], minimum, 4 * align), align)
    searched = 0
    for size in sides:
        side = round_up(max(size, least), align)
        # The line is searched along one side, so the other side may be shorter, which saves time;
        # but not as short as an attention window, which some models do not shift then.
        other = max(round_up(side // 2, align), least)
        image = torch.rand(1, channels, side, other, generator=generator).to(device)
        images = {2: image, 3: image.mT.contiguous()}
        searched = side // 2 - align
        radius = _max_spread(forward, images, scale, align, propagates_nan)
        if radius is None:
            continue
        confirmed = all(
            _tiles_agree(forward, one, axis, scale, align, minimum, 2 * radius)
            for axis, one in images.items()
        )
        return ReceptiveField(radius if confirmed else None, searched)
    return ReceptiveField(None, searched)


def _max_spread(
    forward: Forward, images: Mapping[int, Tensor], scale: int, align: int, propagates_nan: bool
) -> int | None:
    """Return the largest spread along both axes; None if it fills one of the images."""
    largest = 0
    for axis, image in images.items():
        spread = _spread_along(forward, image, axis, scale, align, propagates_nan)
        if spread is None:
            return None
        largest = max(largest, spread)
    return largest


def _spread_along(
    forward: Forward, image: Tensor, axis: int, scale: int, align: int, propagates_nan: bool
) -> int | None:
    """Return the largest spread along an axis over several lines; None if it fills.

    In both directions.
    """
    side, radius = image.shape[axis], 0
    poisons = [torch.full_like(image, torch.nan)]
    clean = None
    if not propagates_nan:
        # Both signs, so that a minimum passes them as a maximum does.
        poisons.append((image - 0.5) * _LARGE)
        clean = forward(image)
    middle = side // 2 // align * align
    lines = [line for k in range(_PHASES) if (line := middle + (k - 1) * align) < side]
    for line in dict.fromkeys(lines):
        for after in (True, False):
            index = (slice(None),) * axis + (slice(line, None) if after else slice(None, line),)
            bad = _changed_outputs(forward, image, poisons, index, clean)
            hit = bad.movedim(axis, 0).flatten(1).any(1).nonzero().flatten()
            if not len(hit):
                if propagates_nan:  # the model drops it: masks made by comparison do
                    return _spread_along(forward, image, axis, scale, align, False)
                continue  # constant
            first, last = int(hit[0]) // scale, int(hit[-1]) // scale
            filled = first == 0 if after else last == side - 1
            if filled:
                return None
            radius = max(radius, line - first if after else last + 1 - line)
    return radius


def _changed_outputs(
    forward: Forward,
    image: Tensor,
    poisons: list[Tensor],
    index: tuple[slice, ...],
    clean: Tensor | None,
) -> Tensor:
    """Return where results are not finite, or differ from ``clean``.

    ``index`` is where the input is poisoned.
    """
    found: list[Tensor] = []
    for poison in poisons:
        poisoned = image.clone()
        poisoned[index] = poison[index]
        result = forward(poisoned)
        found.append(~result.isfinite() if clean is None else result != clean)
    return torch.stack(found).any(0)


def _tiles_agree(
    forward: Forward, image: Tensor, axis: int, scale: int, align: int, minimum: int, overlap: int
) -> bool:
    """Return whether tiles with this overlap reproduce the whole along an axis."""
    side = image.shape[axis]
    # Half of what the overlap leaves: two tiles, whatever the receptive field.
    tile = round_up(max((side + overlap) // 2, minimum), align)
    layout = split_axis(side, tile, overlap, align=align)
    whole = forward(image)
    for index, start in enumerate(layout.starts):
        low, high = layout.span(index)
        part = forward(image.narrow(axis, start, layout.tile).contiguous())
        actual = part.narrow(axis, (low - start) * scale, (high - low) * scale)
        expected = whole.narrow(axis, low * scale, (high - low) * scale)
        if not (actual - expected).abs().max() <= _TOLERANCE:
            return False
    return True
