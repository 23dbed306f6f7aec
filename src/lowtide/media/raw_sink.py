"""Result of a denoised camera RAW file: its mosaic, or what LibRaw develops of it, with EXIF."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.media.encode import EncodeOptions
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import open_sink
from lowtide.media.metadata import ImageMetadata
from lowtide.media.raw_facts import RawOutputFacts
from lowtide.media.raw_file import RawSource

_ROWS = 64

_SHORT, _LONG, _ASCII, _RATIONAL = 3, 4, 2, 5
_ARTIST, _EXIF, _TIME, _EXPOSURE, _APERTURE, _ISO, _TAKEN, _FOCAL = (
    *(0x013B, 0x8769, 0x0132, 0x829A),
    *(0x829D, 0x8827, 0x9003, 0x920A),
)
_HEADER = 8
_Entry = tuple[int, int, int, bytes]  # tag, type, count, data


class RawSink:
    """`lowtide.media.image_info.ImageRowWriter` of a RAW file's planes.

    Rows are put back in their place in the values of ``source``, which are in memory once: a row
    may be written when it was read. The file is developed and encoded by `finish`.

    Args:
        target: The output file.
        result: What is written.
        part: Temporary file in the folder of ``target``, by default of a random name.
        replace: Whether a file that is at ``target`` in the end is replaced.

    Raises:
        OutputError: The folder cannot be made or written.
    """

    def __init__(
        self,
        target: Path,
        source: RawSource,
        result: RawOutputFacts,
        *,
        strip_metadata: bool,
        options: EncodeOptions,
        part: Path | None,
        replace: bool,
    ) -> None:
        self.info: ImageInfo = source.info
        self._layout, self._output = source.layout, result.output
        self._file = open_sink(
            target,
            result.info,
            metadata=ImageMetadata(exif=exif_of(source.raw.other)),
            strip_metadata=strip_metadata,
            options=options,
            default_format=result.format,
            part=part,
            replace=replace,
        )
        self.notes: Sequence[str] = self._file.notes
        self._raw, self._open = source.raw.share(), True
        self._finished = False

    def write(self, first: int, values: np.ndarray) -> None:
        """Put rows (N, W', C) of the planes in their place."""
        self._layout.scatter(values, first, self._raw.values)

    def close_rows(self) -> None:
        """Signal that all rows were written; does nothing here, as `commit` finishes."""

    def finish(self) -> None:
        """Develop and encode the file; does nothing if already done.

        Raises:
            ImageError: It cannot be developed.
            OutputError: It cannot be written; no files are left behind.
        """
        if self._finished:
            return
        values = self._raw.values
        if self._output != "mosaic":
            bits = 8 * self._file.info.sample_bytes
            values = self._raw.develop(bits=bits, linear=self._output == "linear")
        rows = values.reshape(*values.shape[:2], -1)
        for first in range(0, len(rows), _ROWS):
            self._file.write(first, np.ascontiguousarray(rows[first : first + _ROWS]))
        del values, rows
        self._release()
        self._file.finish()
        self._finished = True

    def commit(self) -> Path:
        """Finish the file, rename it to its target, and return the target."""
        self.finish()
        return self._file.commit()

    def abort(self) -> None:
        """Remove the part file and new folders; does nothing after `commit`."""
        self._file.abort()
        self._release()

    def _release(self) -> None:
        if self._open:
            self._raw.close()
            self._open = False


def exif_of(other: Any) -> bytes:
    """Return an EXIF block of ISO, exposure time, aperture, focal length, time and artist.

    Args:
        other: `rawpy.RawPy.other`, of which values that are unknown are 0 or empty.
    """
    first, second = list[_Entry](), list[_Entry]()
    if other.artist:
        first.append(_text(_ARTIST, other.artist))
    if isinstance(other.timestamp, datetime) and other.timestamp.year > 1970:
        taken = other.timestamp.strftime("%Y:%m:%d %H:%M:%S")
        first.append(_text(_TIME, taken))
        second.append(_text(_TAKEN, taken))
    for tag, value in (
        (_EXPOSURE, other.shutter_speed),
        (_APERTURE, other.aperture),
        (_FOCAL, other.focal_length),
    ):
        if math.isfinite(value) and 0 < value < 1e5:
            second.append((tag, _RATIONAL, 1, _ratio(value)))
    if math.isfinite(other.iso_speed) and 1 <= other.iso_speed < 65_536:
        second.append((_ISO, _SHORT, 1, struct.pack("<H", round(other.iso_speed))))
    pointer = (_EXIF, _LONG, 1, struct.pack("<L", 0))
    at = _HEADER + len(_directory([*first, pointer], _HEADER))
    first.append((_EXIF, _LONG, 1, struct.pack("<L", at)))
    head = b"Exif\0\0II*\0" + struct.pack("<L", _HEADER)
    return head + _directory(first, _HEADER) + _directory(second, at)


def _text(tag: int, text: str) -> _Entry:
    data = text.encode("utf-8", "replace") + b"\0"
    return tag, _ASCII, len(data), data


def _ratio(value: float) -> bytes:
    """Return a fraction: 1/n of short exposures, thousandths of others."""
    above, below = (1, round(1 / value)) if value < 0.1 else (round(value * 1000), 1000)
    return struct.pack("<LL", above, below)


def _directory(entries: list[_Entry], at: int) -> bytes:
    """Return a TIFF directory that lies at byte ``at``, and the data that do not fit in it."""
    data, more = struct.pack("<H", len(entries)), b""
    start = at + len(data) + 12 * len(entries) + 4
    for tag, kind, count, value in sorted(entries):
        if len(value) > 4:
            value, more = (
                struct.pack("<L", start + len(more)),
                more + value + b"\0" * (len(value) % 2),
            )
        data += struct.pack("<HHL", tag, kind, count) + value.ljust(4, b"\0")
    return data + struct.pack("<L", 0) + more
