"""Streaming image reader: decodes rows from top to bottom, upright."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyvips

from lowtide.core.errors import ImageError
from lowtide.core.heap import trim_heap, trimming_heap
from lowtide.core.input_file import require_input
from lowtide.core.signal import ClosedOnExit
from lowtide.media._libvips import (
    FILE_ERRORS,
    READ_TRIM_BYTES,
    HeapTrimmer,
    is_harmless_jpeg_error,
    libvips_error_text,
)
from lowtide.media.image_facts import MAX_PIXELS, ImageFacts, OpenDecoder, open_decoder
from lowtide.media.image_info import ImageInfo, ValueRange
from lowtide.media.metadata import ImageMetadata
from lowtide.media.pixels import dtype_of
from lowtide.media.whole_file import RowSpool


def open_image(
    path: Path | str,
    *,
    max_pixels: int = MAX_PIXELS,
    scratch_dir: Path | str | None = None,
    value_range: ValueRange | None = None,
    with_alpha: bool = True,
) -> ImageSource:
    """Open an image file for reading by rows, upright.

    ``scratch_dir`` is the folder where an image is spooled that must be rotated, the system's
    temporary folder by default. ``value_range`` is what its values are known to be. Not
    ``with_alpha`` leaves out an alpha channel. Raises `ImageError` as `inspect_image`. Damage
    further down in the file raises `ImageError` from `ImageSource.read`.
    """
    source = Path(path)
    scratch = Path(scratch_dir) if scratch_dir is not None else None
    opened = open_decoder(source, max_pixels)
    if not with_alpha:
        opened = _without_alpha(opened)
    zero_alpha = opened.stored_info.alpha and _is_clear(source, open_decoder(source, max_pixels))
    if opened.stored_info.alpha:
        trim_heap()  # what was decoded for that, a frame in some formats, is read again
    made = ImageSource(source, opened, scratch, zero_alpha=zero_alpha)
    made.facts = replace(made.facts, info=replace(made.info, value_range=value_range))
    return made


def _without_alpha(opened: OpenDecoder) -> OpenDecoder:
    stored, shown = opened.stored_info, opened.facts.info
    again = opened.reopen_tolerant
    return replace(
        opened,
        image=opened.image.extract_band(0, n=stored.color_channels),
        stored_info=replace(stored, channels=stored.color_channels),
        facts=replace(opened.facts, info=replace(shown, channels=shown.color_channels)),
        reopen_tolerant=None if again is None else lambda: _without_alpha(again()),
    )


def is_opaque(path: Path, max_pixels: int) -> bool:
    """Return whether the alpha of an image is full everywhere, which may take to read all of it.

    Raises `ImageError` as `inspect_image`, and for damage further down.
    """
    state = require_input(path, ImageError)
    return _is_opaque(path, max_pixels, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _is_opaque(path: Path, max_pixels: int, _changed: int, _bytes: int) -> bool:
    opened = open_decoder(path, max_pixels)
    full = opened.stored_info.full_scale
    return _all_alpha(path, opened, lambda alpha: bool((alpha == full).all()))


def _is_clear(path: Path, opened: OpenDecoder) -> bool:
    """Return whether alpha is 0 everywhere."""
    return _all_alpha(path, opened, lambda alpha: not alpha.any())


def _all_alpha(path: Path, opened: OpenDecoder, fits: Callable[[np.ndarray], bool]) -> bool:
    """Return whether alpha fits everywhere; stops at the first rows where it does not."""
    decoder = _Decoder(path, opened)
    while len(rows := decoder.read(_FETCH_ROWS)):
        if not fits(rows[..., -1]):
            return False
    return True


# libvips keeps several times the rows of one fetch.
_FETCH_ROWS = 8


class _Decoder:
    """Sequential decoder of rows before orientation; ``opaque`` sets alpha to white."""

    def __init__(self, path: Path, opened: OpenDecoder, *, opaque: bool = False) -> None:
        self._path = path
        self._info = opened.stored_info
        self._region = pyvips.Region.new(opened.image)
        self._reopen_tolerant = opened.reopen_tolerant
        self._trimmer = HeapTrimmer(READ_TRIM_BYTES)
        self._next_row = 0
        self._opaque = opaque

    def read(self, count: int) -> np.ndarray:
        info, top = self._info, self._next_row
        count = min(count, info.height - top)
        if count <= 0:
            return np.empty((0, info.width, info.channels), dtype_of(info.sample_type))
        rows = np.empty((count, info.width, info.channels), dtype_of(info.sample_type))
        for start in range(0, count, _FETCH_ROWS):
            self._fetch(rows[start : start + _FETCH_ROWS])
        return rows

    def _fetch(self, rows: np.ndarray) -> None:
        info = self._info
        # The first one may decode the whole image, in blocks that no later ones fit into.
        heap = contextlib.nullcontext() if self._next_row else trimming_heap()
        try:
            with heap:
                pixels = self._region.fetch(0, self._next_row, info.width, len(rows))
        except FILE_ERRORS as error:
            if self._reopen_tolerant is not None and is_harmless_jpeg_error(error):
                self._region, self._reopen_tolerant = (
                    pyvips.Region.new(self._reopen_tolerant().image),
                    None,
                )
                self._fetch(rows)
                return
            raise ImageError(
                f"{self._path}: damaged or cut short after row {self._next_row:,} of"
                f" {info.height:,} ({libvips_error_text(error)})"
            ) from error
        rows[:] = np.frombuffer(pixels, rows.dtype).reshape(rows.shape)
        if self._opaque:
            rows[..., -1] = info.full_scale
        self._next_row += len(rows)
        self._trimmer.add(rows.nbytes)


class ImageSource(ClosedOnExit):
    """Image file as a `lowtide.core.signal.RowSource`; made by `open_image`.

    ``facts`` are those of `inspect_image`, ``metadata`` is to be written to the output.
    ``zero_alpha`` is whether alpha is 0 everywhere: the color of such a file has another use than
    display, so that it is read as opaque and is to be written with ``zero_alpha`` again. Also a
    context manager.
    """

    def __init__(
        self, path: Path, opened: OpenDecoder, scratch_dir: Path | None, *, zero_alpha: bool = False
    ) -> None:
        self.zero_alpha = zero_alpha
        self.facts: ImageFacts = opened.facts
        self.metadata: ImageMetadata = opened.metadata
        self._path = path
        self._stored_info = opened.stored_info
        self._scratch_dir = scratch_dir
        self._decoder: _Decoder | None = _Decoder(path, opened, opaque=zero_alpha)
        self._spool: RowSpool | None = None
        self._next_row = 0

    @property
    def info(self) -> ImageInfo:
        """Shape and sample type of the upright image that `read` returns."""
        return self.facts.info

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the upright image."""
        return self.info.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of its samples."""
        return dtype_of(self.info.sample_type)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, C); none below the image.

        Rows before ``first`` that were not read are skipped, and those that were cannot be read
        again. The first call on an image that must be rotated decodes all of it into the scratch
        folder. Raises `ImageError` if the file is damaged or truncated, and `OutputError` if the
        scratch folder is full.
        """
        if self._decoder is None:
            raise ValueError(f"{self._path}: read after close")
        if first < self._next_row:
            raise ValueError(f"{self._path}: row {first} after row {self._next_row} was reached")
        first, last = min(first, self.info.height), min(last, self.info.height)
        if self.facts.orientation in (1, 2):
            for skipped in range(self._next_row, first, _FETCH_ROWS):
                self._decoder.read(min(_FETCH_ROWS, first - skipped))
            rows = self._decoder.read(last - first)
            rows = np.ascontiguousarray(rows[:, ::-1]) if self.facts.orientation == 2 else rows
        else:
            rows = self._spooled(self._decoder).read(first, last - first)
        self._next_row = last
        return rows

    def _spooled(self, decoder: _Decoder) -> RowSpool:
        if self._spool is None:
            spool = RowSpool(self._stored_info, self.facts.orientation, self._scratch_dir)
            try:
                spool.fill(decoder.read)
            except BaseException:
                spool.close()
                raise
            self._spool = spool
        return self._spool

    def close(self) -> None:
        """Release the file and the disk space of the spool; may be called more than once."""
        self._decoder = None
        if self._spool is not None:
            self._spool.close()
            self._spool = None


# Rows of a part that are read at once: those of the whole image are longer.
_READ_ROWS = 16


class CroppedSource(ClosedOnExit):
    """Part of an open image, as a `lowtide.media.image_info.ImageRowReader`.

    Args:
        source: The picture, which is closed with this.
        left, top, width, height: The part, in pixels.
    """

    def __init__(self, source: ImageSource, left: int, top: int, width: int, height: int) -> None:
        self._source, self._left, self._top = source, left, top
        self.metadata, self.zero_alpha = source.metadata, source.zero_alpha
        self.info = replace(source.info, width=width, height=height)
        self.shape, self.dtype = self.info.shape, source.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, C); none below the part."""
        left, top, (height, width, _) = self._left, self._top, self.shape
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
