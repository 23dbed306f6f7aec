"""Masks of shifted windows (Swin) by pattern, without dense tensors.

A dense mask has a value for each pair of pixels of each window, and nearly all are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern

# Added by Swin-like models to scores of pixels that were not neighbors before the shift.
_MASKED_SCORE = -100.0


@dataclass(frozen=True)
class ShiftMask:
    """Attention mask of shifted windows, stored as sizes instead of values.

    For an image of ``height``×``width`` in windows of ``window``, shifted up and to the left by
    ``shift``. Only windows along the lower and right edge are masked; without a shift, for which
    SwinIR and DRCT make a mask as well, none is.

    Replaces the models' mask tensor (windows, N, N), which takes hundreds of megabytes for a
    photograph.
    """

    height: int
    width: int
    window: int
    shift: int

    def to(self, *_: object, **__: object) -> ShiftMask:
        """Return the mask itself, which has no device and no dtype."""
        return self

    @cached_property
    def windows_by_edges(self) -> dict[tuple[bool, bool], tuple[int, ...]]:
        """Indices of windows, keyed by (at the lower edge, at the right edge)."""
        rows, columns = self.height // self.window, self.width // self.window
        found: dict[tuple[bool, bool], list[int]] = {}
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            edges = row == rows - 1, column == columns - 1
            found.setdefault(edges if self.shift else (False, False), []).append(place)
        return {edges: tuple(places) for edges, places in found.items()}

    def patterns(self, like: Tensor) -> list[MaskPattern]:
        """Return the masks (1, 1, N, N) and the windows that each covers.

        Masks have dtype and device of ``like``. In a batch the windows of one image follow those of
        another.
        """
        each = self.height // self.window * (self.width // self.window)
        images = range(len(like) // each)
        return [
            MaskPattern(
                tuple(image * each + place for image in images for place in places),
                self.edge_mask(edges, like) if any(edges) else None,
            )
            for edges, places in self.windows_by_edges.items()
        ]

    def edge_mask(self, edges: tuple[bool, bool], like: Tensor) -> Tensor:
        """Return the mask (1, 1, N, N) of windows at these edges."""
        along = torch.arange(self.window, device=like.device) >= self.window - self.shift
        down, across = along * edges[0], along * edges[1]
        region = (2 * down[:, None] + across[None]).flatten()
        apart = region[:, None] != region[None]
        return like.new_zeros(apart.shape).masked_fill_(apart, _MASKED_SCORE)[None, None]

    def dense(self, like: Tensor) -> Tensor:
        """Return the dense mask (windows, N, N) that models build."""
        count = self.height // self.window * (self.width // self.window)
        found = like.new_zeros(count, self.window**2, self.window**2)
        for edges, places in self.windows_by_edges.items():
            if any(edges):
                found[list(places)] = self.edge_mask(edges, like)[0]
        return found


@dataclass(frozen=True)
class WindowOrder:
    """Order of an image's pixels that groups windows with the same mask.

    Windows are shifted as those of ``mask``; ``pixel_indices``, int64 (H · W,), holds the pixels'
    indices in that order.
    """

    mask: ShiftMask
    pixel_indices: Tensor

    @classmethod
    @torch.inference_mode(False)
    def of(cls, mask: ShiftMask, device: torch.device) -> WindowOrder:
        """Return the order for tensors on ``device``.

        It is cached and may be used with gradients later, which inference tensors do not allow.
        """
        window, shift = mask.window, mask.shift
        pixels = torch.arange(mask.height * mask.width).view(mask.height, mask.width)
        pixels = pixels.roll((-shift, -shift), (0, 1))
        rows = pixels.view(mask.height // window, window, mask.width // window, window)
        windows = rows.transpose(1, 2).reshape(-1, window * window)
        places = [place for group in mask.windows_by_edges.values() for place in group]
        return cls(mask, windows[places].flatten().to(device))

    def patterns(self, like: Tensor) -> list[MaskPattern]:
        """Return the masks (1, 1, N, N) and the windows of one image that each covers."""
        found, first = [], 0
        for edges, group in self.mask.windows_by_edges.items():
            places = range(first, first + len(group))
            found.append(
                MaskPattern(places, self.mask.edge_mask(edges, like) if any(edges) else None)
            )
            first = places.stop
        return found
