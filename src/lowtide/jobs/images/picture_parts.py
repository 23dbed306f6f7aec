"""Parts of a picture that are denoised: a crop for a preview, and a mask of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.signal import ClosedOnExit
from lowtide.media import ImageFacts, ImageSource, inspect_image, open_image
from lowtide.media.image_info import ImageInfo

_READ_ROWS = 16


class PreviewPart(NamedTuple):
    """Rectangle of a picture, in pixels from its left and upper edge."""

    left: int
    top: int
    width: int
    height: int

    def facts_of(self, source: Path, facts: ImageFacts) -> ImageFacts:
        """Return the facts of a picture with the size of this part of it.

        Raises:
            UsageError: It lies outside.
        """
        info, (left, top, width, height) = facts.info, self
        if left + width > info.width or top + height > info.height:
            raise UsageError(
                f"--preview {left},{top},{width},{height} lies outside of {source}, which is"
                f" {info.width}×{info.height}",
                hint=f"--preview {self._inside(info)}",
            )
        return replace(facts, info=replace(info, width=width, height=height))

    def _inside(self, info: ImageInfo) -> str:
        """Return the nearest part of the same size, or of all there is, as text."""
        width, height = min(self.width, info.width), min(self.height, info.height)
        left, top = min(self.left, info.width - width), min(self.top, info.height - height)
        return f"{left},{top},{width},{height}"


class CroppedSource(ClosedOnExit):
    """Part of an open picture, as a `lowtide.media.image_info.ImageRows`.

    Args:
        source: The picture, which is closed with this.
    """

    def __init__(self, source: ImageSource, crop: PreviewPart) -> None:
        self._source, self._crop = source, crop
        self.metadata, self.zero_alpha = source.metadata, source.zero_alpha
        self.info = replace(source.info, width=crop.width, height=crop.height)
        self.shape, self.dtype = self.info.shape, source.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, C); none below the part."""
        left, top, width, height = self._crop
        first, last = min(first, height), min(last, height)
        rows = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        for start in range(0, len(rows), _READ_ROWS):  # rows of the picture are longer than these
            stop = min(start + _READ_ROWS, len(rows))
            found = self._source.read(top + first + start, top + first + stop)
            rows[start:stop] = found[:, left : left + width]
        return rows

    def close(self) -> None:
        """Close the picture; may be called more than once."""
        self._source.close()


class MaskSource(ClosedOnExit):
    """Picture of weights as a source of float64 rows (N, W, 1): white 1, black and clear 0."""

    def __init__(self, picture: ImageSource | CroppedSource) -> None:
        self._picture, self._info = picture, picture.info
        self.shape = (*picture.shape[:2], 1)
        self.dtype = np.dtype(np.float64)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``; none below the mask."""
        info = self._info
        values = self._picture.read(first, last) / np.float64(info.full_scale)
        values = np.nan_to_num(values.clip(0, 1), copy=False)
        weights = values[..., : info.color_channels].mean(-1, keepdims=True)
        return weights * values[..., -1:] if info.alpha else weights

    def close(self) -> None:
        """Close the picture; may be called more than once."""
        self._picture.close()


def inspect_mask(mask: Path, source: Path, info: ImageInfo, max_pixels: int) -> ImageFacts:
    """Return the facts of a mask for a picture of ``info``.

    Raises:
        ImageError: It cannot be read.
        UsageError: It has another size.
    """
    facts = inspect_image(mask, max_pixels=max_pixels)
    sizes = [f"{one.width}×{one.height}" for one in (facts.info, info)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the mask {mask} is {sizes[0]}, and {source} is {sizes[1]}",
            hint="draw the mask in a copy of the picture",
        )
    return facts


def open_mask(
    mask: Path, crop: Sequence[int] | None, max_pixels: int, scratch: Path | None
) -> MaskSource:
    """Open a mask, or the part of it that is denoised; raises as `open_image`."""
    opened = open_image(mask, max_pixels=max_pixels, scratch_dir=scratch)
    return MaskSource(opened if crop is None else CroppedSource(opened, PreviewPart(*crop)))
