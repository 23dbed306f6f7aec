"""Disk spool of decoded rows, for images that must be rotated by EXIF orientation.

Rows are stored in blocks. For orientations 5 to 8 each block is stored transposed, so that the
columns which make a batch of upright rows are one contiguous read per block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import is_disk_full
from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes
from lowtide.media.image_info import ImageInfo
from lowtide.media.pixels import dtype_of

_BLOCK_BYTES = 4 << 20


def upright_info(info: ImageInfo, orientation: int) -> ImageInfo:
    """Return ``info`` of the upright image: orientations 5 to 8 swap width and height."""
    if orientation < 5:
        return info
    return ImageInfo(info.height, info.width, info.channels, info.sample_type)


def spool_bytes(info: ImageInfo, orientation: int) -> int:
    """Return the spool's bytes on disk: 0 for orientations 1 and 2, else the image's."""
    return 0 if orientation in (1, 2) else info.height * info.row_bytes


def spool_memory(info: ImageInfo, orientation: int) -> int:
    """Return the host memory of the spool in bytes.

    It is a block, its transposed copy, and as much read back.
    """
    return 0 if orientation in (1, 2) else 4 * _rows_per_block(info) * info.row_bytes


def _rows_per_block(info: ImageInfo) -> int:
    return min(max(16, _BLOCK_BYTES // info.row_bytes), info.height)


class Spool:
    """Temporary file of rows, read back upright for EXIF orientations 3 to 8.

    The file has no name: it is removed when it is closed or the process dies.
    """

    def __init__(self, info: ImageInfo, orientation: int, scratch_dir: Path | None) -> None:
        """Open an empty spool for rows like ``info``.

        ``scratch_dir`` defaults to the system's temporary folder. Raises `OutputError` if the
        file cannot be created there.
        """
        self._info = info
        self._orientation = orientation
        self._folder = Path(scratch_dir or tempfile.gettempdir())
        self._block_rows = _rows_per_block(info)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from error

    def fill(self, read: Callable[[int], np.ndarray]) -> None:
        """Store all rows of the image, from repeated calls of ``read(count)``.

        ``read`` returns the next (count, W, C). Raises `OutputError` if the scratch folder is full.
        """
        for top in range(0, self._info.height, self._block_rows):
            rows = read(min(self._block_rows, self._info.height - top))
            if self._orientation >= 5:
                rows = np.ascontiguousarray(rows.transpose(1, 0, 2))
            view = rows.data.cast("B")
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                raise self._failure(error) from error

    def read(self, top: int, count: int) -> np.ndarray:
        """Return the upright rows ``top`` to ``top + count``, (rows, W, C)."""
        if count == 0:
            return self._empty(0, upright_info(self._info, self._orientation).width)
        if self._orientation in (3, 4):
            first = self._info.height - top - count
            rows = self._read_rows(first, count)[::-1]
            return np.ascontiguousarray(rows[:, ::-1] if self._orientation == 3 else rows)
        # 5 is the transpose, 6 also reverses columns, 8 rows, 7 both.
        from_right = self._orientation in (7, 8)
        first = self._info.width - top - count if from_right else top
        rows = self._read_columns(first, count)
        rows = rows[::-1] if from_right else rows
        return np.ascontiguousarray(rows[:, ::-1] if self._orientation in (6, 7) else rows)

    def _read_rows(self, first: int, count: int) -> np.ndarray:
        rows = self._empty(count, self._info.width)
        self._read_into(rows, first * self._info.row_bytes)
        return rows

    def _read_columns(self, first: int, count: int) -> np.ndarray:
        rows = self._empty(count, self._info.height)
        pixel = self._info.row_bytes // self._info.width
        for top in range(0, self._info.height, self._block_rows):
            high = min(self._block_rows, self._info.height - top)
            block = self._empty(count, high)
            self._read_into(block, top * self._info.row_bytes + first * high * pixel)
            rows[:, top : top + high] = block
        return rows

    def _empty(self, height: int, width: int) -> np.ndarray:
        return np.empty((height, width, self._info.channels), dtype_of(self._info.sample_type))

    def _read_into(self, array: np.ndarray, offset: int) -> None:
        view = array.data.cast("B")
        self._file.seek(offset)
        while view:
            count = self._file.readinto(view)
            if not count:
                at = self._file.tell()
                raise OutputError(f"{self._folder}: the scratch file ended early, at byte {at:,}")
            view = view[count:]

    def _failure(self, error: OSError) -> OutputError:
        needed = spool_bytes(self._info, self._orientation)
        what = "is full" if is_disk_full(error) else f"cannot be used ({error.strerror})"
        return OutputError(
            f"{self._folder}: the scratch folder {what}; this image has to be rotated by its "
            f"EXIF orientation, which needs {needed:,} bytes ({format_bytes(needed)}) there",
            hint="--scratch DIR on a disk with more free space",
        )

    def close(self) -> None:
        """Close and remove the file; may be called more than once."""
        self._file.close()
