"""Paths as images, exactly invertible: folded by a period, each step a rectangle of pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.core.errors import UsageError


class PathImageMap:
    """Map of paths [B, H, D] to images [B, D, h, w] and back.

    Steps fill rows from left to right; each has a rectangle of pixels of its value. A row is as
    many whole periods as make all rows fit, or a part of one, or the image's width, in that order.

    Args:
        horizon: Steps of a path, H.
        variables: Variables of a path, D.
        period: Steps of a row that are wanted.
        image_size: Height and width in pixels.

    Raises:
        UsageError: An image has fewer pixels than a path has steps.
    """

    def __init__(
        self, horizon: int, variables: int, period: int, image_size: tuple[int, int]
    ) -> None:
        height, width = image_size
        if horizon > height * width:
            raise UsageError(
                f"a path of {horizon:,} steps has no place in an image of {height}x{width} pixels",
                hint=f"give an image_size of at least {horizon:,} pixels, or a shorter horizon",
            )
        self.shape = (horizon, variables)
        self.image_size = image_size
        columns = _columns(horizon, period, height, width)
        rows = -(-horizon // columns)
        row = torch.arange(height) * rows // height
        column = torch.arange(width) * columns // width
        cell = (row[:, None] * columns + column).flatten()
        # The rest of the last row repeats the last step, and is not read.
        self._step = cell.clamp(max=horizon - 1)
        counts = torch.bincount(cell, minlength=horizon)[:horizon]
        number = torch.arange(int(counts.max()))
        place = (counts.cumsum(0) - counts)[:, None] + number
        self._pixels = cell.argsort(stable=True)[place.clamp(max=len(cell) - 1)]
        self._inside = number < counts[:, None]

    def __deepcopy__(self, _memo: object) -> PathImageMap:
        """Return itself: it never changes, and copies of a traced module cannot hold values."""
        return self

    def to_image(self, path: Tensor) -> Tensor:
        """Return the image [B, D, h, w] of ``path`` [B, H, D]."""
        pixels = path.transpose(1, 2)[..., self._step.to(path.device)]
        return pixels.unflatten(2, self.image_size)

    def to_path(self, image: Tensor) -> Tensor:
        """Return the path [B, H, D] of ``image`` [B, D, h, w]: means of each step's pixels.

        Of an image that `to_image` made it is the path, bit for bit.
        """
        values = image.flatten(2)[..., self._pixels.to(image.device)]
        inside, first = self._inside.to(image.device), values[..., 0]
        # In the image of a path no pixel differs from the first, which then stays as it is.
        rest = torch.where(inside, values - first[..., None], 0).sum(dim=-1)
        return (first + rest / inside.sum(dim=-1)).transpose(1, 2)


def _columns(horizon: int, period: int, height: int, width: int) -> int:
    """Return the steps of a row."""
    multiples = range(period, width + 1, period)
    parts = [length for length in range(min(period, width), 0, -1) if period % length == 0]
    for length in (*multiples, *parts):
        columns = min(length, horizon)
        if columns <= width and -(-horizon // columns) <= height:
            return columns
    return min(width, horizon)
