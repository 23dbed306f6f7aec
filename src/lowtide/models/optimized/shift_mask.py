"""Masks of windows that are shifted round an image, as the few forms that they have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern

# What Swin's descendants add to scores of places that were not neighbors before the shift.
_APART = -100.0


@dataclass(frozen=True)
class ShiftMask:
    """The mask of an image of ``height``×``width`` in windows of ``window``, shifted up and to the
    left by ``shift``, without its numbers: nothing is masked but along the lower and right edge,
    and without a shift, for which SwinIR and DRCT make one as well, nothing at all.

    Stands where models put a tensor (windows, places, places), which for a photograph takes
    hundreds of megabytes.
    """

    height: int
    width: int
    window: int
    shift: int

    def to(self, *_: object, **__: object) -> ShiftMask:
        """As a tensor's: this has no device and no type."""
        return self

    @cached_property
    def places(self) -> dict[tuple[bool, bool], tuple[int, ...]]:
        """Windows by whether they lie at the lower and at the right edge."""
        rows, columns = self.height // self.window, self.width // self.window
        found: dict[tuple[bool, bool], list[int]] = {}
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            edges = row == rows - 1, column == columns - 1
            found.setdefault(edges if self.shift else (False, False), []).append(place)
        return {edges: tuple(places) for edges, places in found.items()}

    def patterns(self, like: Tensor) -> list[MaskPattern]:
        """Which windows have which mask (1, 1, places, places), in ``like``'s type on its
        device. For a batch, windows of one image after those of another."""
        each = self.height // self.window * (self.width // self.window)
        images = range(len(like) // each)
        return [
            MaskPattern(
                tuple(image * each + place for image in images for place in places),
                self.added(edges, like) if any(edges) else None,
            )
            for edges, places in self.places.items()
        ]

    def added(self, edges: tuple[bool, bool], like: Tensor) -> Tensor:
        """The mask of windows at these edges, (1, 1, places, places)."""
        along = torch.arange(self.window, device=like.device) >= self.window - self.shift
        down, across = along * edges[0], along * edges[1]
        region = (2 * down[:, None] + across[None]).flatten()
        apart = region[:, None] != region[None]
        return like.new_zeros(apart.shape).masked_fill_(apart, _APART)[None, None]

    def dense(self, like: Tensor) -> Tensor:
        """As models have it: (windows, places, places)."""
        count = self.height // self.window * (self.width // self.window)
        found = like.new_zeros(count, self.window**2, self.window**2)
        for edges, places in self.places.items():
            if any(edges):
                found[list(places)] = self.added(edges, like)[0]
        return found


@dataclass(frozen=True)
class WindowOrder:
    """Pixels of an image as windows, shifted as `ShiftMask`'s, and those with the same mask beside
    one another: ``there`` are their indices in that order."""

    mask: ShiftMask
    there: Tensor

    @classmethod
    @torch.inference_mode(False)
    def of(cls, mask: ShiftMask, device: torch.device) -> WindowOrder:
        """For tensors on ``device``. It is kept, and may be called for with gradients the next
        time: tensors of inference would not do."""
        window, shift = mask.window, mask.shift
        pixels = torch.arange(mask.height * mask.width).view(mask.height, mask.width)
        pixels = pixels.roll((-shift, -shift), (0, 1))
        rows = pixels.view(mask.height // window, window, mask.width // window, window)
        windows = rows.transpose(1, 2).reshape(-1, window * window)
        places = [place for group in mask.places.values() for place in group]
        return cls(mask, windows[places].flatten().to(device))

    def patterns(self, like: Tensor) -> list[MaskPattern]:
        """Which windows of one image have which mask (1, 1, places, places)."""
        found, first = [], 0
        for edges, group in self.mask.places.items():
            places = range(first, first + len(group))
            found.append(MaskPattern(places, self.mask.added(edges, like) if any(edges) else None))
            first = places.stop
        return found
