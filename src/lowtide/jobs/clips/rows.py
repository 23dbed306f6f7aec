"""Rows of a video's frame as a source, and planes of a result as a sink of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core.signal import ClosedOnExit
from lowtide.media.image_info import ImageInfo
from lowtide.media.video.color import PlaneBuilder, rgb_rows
from lowtide.media.video.picture_format import PictureFormat

_BAND_VALUES = 1 << 20
# Rows that are converted at a time: a network asks for fewer, and each call costs as much again.
BAND_ROWS = 64


class FrameRowSource(ClosedOnExit):
    """Frame (H, W, 3) whose rows are converted to R'G'B' as they are read, float32 in 0..1."""

    def __init__(self, planes: Sequence[np.ndarray], format: PictureFormat) -> None:
        self._planes, self._format = planes, format
        self.info = frame_info(format)
        self.shape = self.info.shape
        self.dtype = np.dtype(np.float32)
        self._band, self._band_first = np.empty((0, format.width, 3), np.float32), 0

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, 3); none below the frame."""
        height = self._format.height
        last = min(last, height)
        start, end = self._band_first, self._band_first + len(self._band)
        if first < start or last > end:
            end = min(height, max(last, first + BAND_ROWS))
            self._band = rgb_rows(self._planes, self._format, first, end)
            start = self._band_first = first
        return self._band[first - start : last - start]

    def close(self) -> None:
        """Do nothing: the decoder owns the samples."""


class FrameRowSink:
    """Planes of a result, made from its rows as they come.

    ``made`` is the size of the rows. Where ``stored`` has another one, they are kept in float32 and
    resampled when the last one has come.
    """

    def __init__(self, made: ImageInfo, stored: PictureFormat) -> None:
        self._rows, self._made = PlaneBuilder(stored), made
        self._whole: np.ndarray | None = None
        if (made.width, made.height) != (stored.width, stored.height):
            self._whole = np.empty(made.shape, np.float32)
        self._stored = stored
        # Channels of rows that wait until they are a band, and the first one's number.
        self._band = np.empty((3, BAND_ROWS, stored.width), np.float32)
        self._band_first = 0

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, 3) from row ``first`` on, in order."""
        if self._whole is not None:
            self._whole[first : first + len(values)] = values
            return
        channels, height = values.transpose(2, 0, 1), self._stored.height
        while channels.shape[1]:
            start = first - self._band_first
            count = min(BAND_ROWS - start, channels.shape[1])
            self._band[:, start : start + count] = channels[:, :count]
            channels, first = channels[:, count:], first + count
            if start + count == BAND_ROWS or first == height:
                band = self._band[:, : start + count].transpose(1, 2, 0)
                self._rows.write(self._band_first, band)
                self._band_first = first

    @property
    def planes(self) -> list[np.ndarray]:
        """The samples to store; all rows have to be written."""
        if self._whole is not None:
            self._resample(self._whole)
            self._whole = None
        return self._rows.planes

    def _resample(self, whole: np.ndarray) -> None:
        import pyvips

        from lowtide.media.pixels import resample_image

        stored = self._stored
        image = resample_image(pyvips.Image.new_from_array(whole), stored.width, stored.height)
        step = max(1, _BAND_VALUES // (3 * stored.width))
        for first in range(0, stored.height, step):
            count = min(step, stored.height - first)
            band = image.crop(0, first, stored.width, count).numpy()
            self._rows.write(first, np.asarray(band, np.float32))


def frame_info(format: PictureFormat) -> ImageInfo:
    """Return the image that the network gets of a frame."""
    return ImageInfo(format.width, format.height, 3, "float32")
