"""Blend of an input's rows with those of its result: by strength, in colors alone, by a mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.core.signal import Sink, Source

# Brightness as a JPEG keeps it, so that one that is written has the grain of the input.
_LUMA = np.array([0.299, 0.587, 0.114])
_BLOCK_VALUES = 1 << 17


@dataclass(frozen=True)
class Blend:
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

    def __init__(self, sink: Sink, blend: Blend, before: Source, mask: Source | None) -> None:
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
