"""Mosaic of a camera RAW file as planes, one for each place of its filter array's period."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.media.image_info import ImageInfo
from lowtide.media.raw_file import RawFile


@dataclass(frozen=True)
class PlanesInfo(ImageInfo):
    """Size of planes of raw values, none of which is alpha."""

    sample_type: str = "uint16"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def alpha(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class PlaneLayout:
    """How rows of a mosaic (H, W) become rows of planes (H', W', ``period``²), and back.

    The planes begin ``top`` rows and ``left`` columns before the mosaic, and at least end with it:
    what is beyond takes the values of the nearest period. With a period of 1 colors are planes.
    """

    period: int = 1
    top: int = 0
    left: int = 0

    def info(self, values: tuple[int, ...]) -> PlanesInfo:
        """Return the size of the planes of an array (H, W) or (H, W, C)."""
        height, width, *colors = values
        channels = colors[0] if colors else self.period**2
        high, wide = (
            -(-(before + size) // self.period)
            for before, size in ((self.top, height), (self.left, width))
        )
        return PlanesInfo(wide, high, channels)

    def gather(self, values: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return rows ``first`` to before ``last`` of the planes, (N, W', C)."""
        if values.ndim == 3:
            return values[first:last].copy()
        info = self.info(values.shape)
        rows = self._places(first, last, self.top, values.shape[0])
        columns = self._places(0, info.width, self.left, values.shape[1])
        chosen = values[rows[:, None], columns]
        blocks = chosen.reshape(last - first, self.period, info.width, self.period)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(last - first, info.width, -1)

    def scatter(self, planes: np.ndarray, first: int, values: np.ndarray) -> None:
        """Write rows (N, W', C) of the planes from row ``first`` on into ``values``."""
        if values.ndim == 3:
            values[first : first + len(planes)] = planes
            return
        period = self.period
        blocks = planes.reshape(len(planes), -1, period, period).swapaxes(1, 2)
        mosaic = blocks.reshape(len(planes) * period, -1)
        start = first * period - self.top
        inside = mosaic[max(-start, 0) :, self.left : self.left + values.shape[1]]
        at = max(start, 0)
        inside = inside[: values.shape[0] - at]
        values[at : at + len(inside)] = inside

    def _places(self, first: int, last: int, before: int, size: int) -> np.ndarray:
        """Return indices into an axis of the mosaic for so many periods of the planes."""
        places = np.arange(first * self.period, last * self.period) - before
        period = max(self.period, before + 1)
        beyond = np.maximum(-(-(places - size + 1) // period), 0)
        places = places - period * beyond + period * (places < 0)
        return places.clip(0, size - 1)


class RawSource:
    """`lowtide.media.image_info.ImageRows` of a RAW file's planes; any rows, again too.

    Args:
        raw: The file, which is closed with the source.
    """

    def __init__(self, raw: RawFile, layout: PlaneLayout) -> None:
        self.raw, self.layout = raw, layout
        self.info: ImageInfo = layout.info(raw.values.shape)
        self.dtype: np.dtype[np.generic] = np.dtype(np.uint16)
        self._open = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H', W', C) of the planes."""
        return self.info.shape

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W', C); none below the image."""
        first, last = (min(one, self.info.height) for one in (first, last))
        return self.layout.gather(self.raw.values, first, last)

    def close(self) -> None:
        """Release the file; may be called more than once."""
        if self._open:
            self.raw.close()
            self._open = False

    def __enter__(self) -> RawSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
