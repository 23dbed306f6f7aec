"""A PNG writer that does not compress: the simplest stream of pixels libvips can read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Gray, gray + alpha, RGB, RGB + alpha.
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_PIECE_BYTES = 1 << 17


class UncompressedPng:
    """Writes an image of known size as an uncompressed PNG, a few rows at a time."""

    def __init__(
        self, write: Callable[[bytes], None], width: int, height: int, bands: int, bits: int
    ) -> None:
        """Send the header. ``write`` takes bytes in order; ``bits`` is 8 or 16."""
        self._write = write
        self._row_bytes = width * bands * bits // 8
        self._deflate = zlib.compressobj(level=0)
        header = struct.pack(">IIBBBBB", width, height, bits, _COLOR_TYPES[bands], 0, 0, 0)
        write(_SIGNATURE)
        self._chunk(b"IHDR", header)

    def rows(self, rows: np.ndarray) -> None:
        """Append rows of shape (n, ...), uint8 or uint16, in the machine's byte order."""
        piece = max(1, _PIECE_BYTES // self._row_bytes)
        for top in range(0, len(rows), piece):
            part = rows[top : top + piece]
            if part.dtype.itemsize == 2:
                part = part.astype(">u2")
            # Every row begins with its filter type, 0 for none.
            lines = np.zeros((len(part), 1 + self._row_bytes), np.uint8)
            lines[:, 1:] = np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1)
            self._data(self._deflate.compress(lines.data))

    def finish(self) -> None:
        """Send what is left and the end mark."""
        self._data(self._deflate.flush())
        self._chunk(b"IEND", b"")

    def _data(self, data: bytes) -> None:
        if data:
            self._chunk(b"IDAT", data)

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._write(struct.pack(">I", len(data)) + name)
        self._write(data)
        self._write(struct.pack(">I", zlib.crc32(data, zlib.crc32(name))))
