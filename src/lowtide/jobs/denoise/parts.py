"""How much of a picture is denoised: a part for a preview, a mask, colors alone, a strength."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.signal import ClosedOnExit, RowSink, RowSource
from lowtide.media import ImageFacts, ImageSource, inspect_image, open_image
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_source import CroppedSource


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
    return MaskSource(opened if crop is None else CroppedSource(opened, *crop))


# Brightness as a JPEG keeps it, so that one that is written has the grain of the input.
_LUMA = np.array([0.299, 0.587, 0.114])
_BLOCK_VALUES = 1 << 17


@dataclass(frozen=True)
class BlendSettings:
    """How far a result goes from its input.

    Attributes:
        strength: 0 for the input, 1 for the result, between them in proportion.
        chroma_only: Whether the brightness stays that of the input.
        white: Sample of white where samples end there, None for those that do not, as floats.
    """

    strength: float = 1.0
    chroma_only: bool = False
    white: int | None = None

    def rows(
        self, before: np.ndarray, after: np.ndarray, mask: np.ndarray | None = None
    ) -> np.ndarray:
        """Return rows (N, W, C) between those of the input and of the result, in their type.

        Equal to ``before`` where the weight is 0, and without ``chroma_only`` to ``after`` where it
        is 1 or a value is not finite.

        Args:
            before: Rows of the input.
            after: Rows of the result.
            mask: Weights (N, W, 1) in 0..1 by which the strength is multiplied, None for 1.
        """
        old, new = before.astype(np.float64), after.astype(np.float64)
        if self.chroma_only:
            colors = new.shape[-1] - (new.shape[-1] in (2, 4))
            new[..., :colors] = self._with_brightness(old[..., :colors], new[..., :colors])
        weight = self.strength * (np.ones(1) if mask is None else mask)
        with np.errstate(invalid="ignore"):  # values that are not finite
            mixed = np.where((weight < 1) & np.isfinite(old), old + weight * (new - old), new)
        if np.issubdtype(before.dtype, np.integer):
            limits = np.iinfo(before.dtype)
            mixed = np.rint(mixed).clip(limits.min, limits.max)
        return mixed.astype(before.dtype)

    def _with_brightness(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return colors (..., C') of the brightness of ``before``; less color where it must be."""
        if before.shape[-1] == 1:
            return before
        with np.errstate(invalid="ignore"):
            luma = (before @ _LUMA)[..., None]
            color = after - (after @ _LUMA)[..., None]
            if self.white is not None:
                room = np.where(color > 0, self.white - luma, luma).clip(0)
                share = room / np.maximum(abs(color), 1e-9)
                color *= share.min(-1, keepdims=True).clip(0, 1)
            made = luma + color
        return np.where(np.isfinite(made), made, after)


class BlendSink:
    """Sink of a result's rows, which passes their blend with the input's rows on.

    Args:
        sink: Takes the blend.
        blend: How far it goes.
        before: The input, read from the top once more.
        mask: Weights (H, W, 1) in 0..1, or None.
    """

    def __init__(
        self, sink: RowSink, blend: BlendSettings, before: RowSource, mask: RowSource | None
    ) -> None:
        self._sink, self._blend, self._before, self._mask = sink, blend, before, mask

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, C) of the result from row ``first`` on."""
        step = max(1, _BLOCK_VALUES // values[0].size)
        for start in range(0, len(values), step):
            after = values[start : start + step]
            top, bottom = first + start, first + start + len(after)
            mask = None if self._mask is None else self._mask.read(top, bottom)
            rows = self._blend.rows(self._before.read(top, bottom), after, mask)
            self._sink.write(top, rows)
