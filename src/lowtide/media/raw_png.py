"""Uncompressed PNG writer, the simplest pixel stream that libvips can read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Gray, gray + alpha, RGB, RGB + alpha.
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_BLOCK_BYTES = 1 << 17


class UncompressedPng:
    """Incremental writer of an uncompressed PNG of known size."""

    def __init__(
        self, write: Callable[[bytes], None], width: int, height: int, channels: int, bits: int
    ) -> None:
        """Write the header. ``write`` takes bytes in order; ``bits`` is 8 or 16."""
        self._write = write
        self._row_bytes = width * channels * bits // 8
        self._deflate = zlib.compressobj(level=0)
        header = struct.pack(">IIBBBBB", width, height, bits, _COLOR_TYPES[channels], 0, 0, 0)
        write(_SIGNATURE)
        self._chunk(b"IHDR", header)
        # A reader returns the header once it has seen where the rows begin.
        self._data(self._deflate.flush(zlib.Z_SYNC_FLUSH))

    def write_rows(self, rows: np.ndarray) -> None:
        """Append rows, (rows, W, C), uint8 or uint16 in native byte order."""
        piece = max(1, _BLOCK_BYTES // self._row_bytes)
        for top in range(0, len(rows), piece):
            part = rows[top : top + piece]
            if part.dtype.itemsize == 2:
                part = part.astype(">u2")
            # Every row begins with its filter type, 0 for none.
            lines = np.zeros((len(part), 1 + self._row_bytes), np.uint8)
            lines[:, 1:] = np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1)
            self._data(self._deflate.compress(lines.data))

    def write_nothing(self) -> None:
        """Write a chunk without data, which a reader that wants rows takes."""
        self._chunk(b"IDAT", b"")

    def finish(self) -> None:
        """Write the remaining data and the IEND chunk."""
        self._data(self._deflate.flush())
        self._chunk(b"IEND", b"")

    def _data(self, data: bytes) -> None:
        if data:
            self._chunk(b"IDAT", data)

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._write(struct.pack(">I", len(data)) + name)
        self._write(data)
        self._write(struct.pack(">I", zlib.crc32(data, zlib.crc32(name))))
