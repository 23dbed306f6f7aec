"""Encoder behind an image sink: a libvips pipeline that reads rows from a pipe and encodes them.

Rows come as an uncompressed PNG, the simplest pixel stream that libvips can read. libvips ends the
process when it cannot make the threads of an encoder. So they are made when a file is opened, and
only where there is room for their stacks: before the network takes all there is.

Heads of files are corrected afterwards: encoders write a resolution whether there is one or not,
and the color of HDR they do not write.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyvips

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.units import MIB, format_bytes
from lowtide.media.encode import EncodeOptions, SaveDetails
from lowtide.media.formats import JPEG, PNG, TIFF, ImageFormat, output_sample
from lowtide.media.image_info import ImageInfo
from lowtide.media.metadata import ImageMetadata, attach_metadata, keep_flags
from lowtide.media.pixels import convert_samples, interpretation_of, resample_image
from lowtide.media.stated_color import rgb_profile_of_gray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Gray, gray + alpha, RGB, RGB + alpha.
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
_BLOCK_BYTES = 1 << 17

# A thread that runs the pipeline, one that computes rows, and two that write them.
_THREADS = 4
# Rows on their way, and the smallest tiles: with less left libvips fails in the midst of a file.
_ROWS_AND_TILES = 32 * MIB
_DEFAULT_STACK = 8 * MIB

_PNG_HEADER_END = 33  # of signature and IHDR
_BLOCK = 1 << 17
_RESOLUTIONS, _UNIT = (282, 283), 296  # tags of TIFF


class VipsEncoder:
    """libvips pipeline from the pipe to the file: resize, conversion, encoding."""

    def __init__(
        self,
        image_format: ImageFormat,
        info: ImageInfo,
        size: tuple[int, int],
        metadata: ImageMetadata,
        options: EncodeOptions,
        *,
        zero_alpha: bool,
    ) -> None:
        # A gray profile in a format that stores gray as RGB becomes one of RGB.
        profile = metadata.profile_for(1) if info.color_channels == 1 else None
        made = rgb_profile_of_gray(profile) if profile and not image_format.gray else None
        self._colors = 3 if made is not None else info.color_channels
        metadata = metadata if made is None else replace(metadata, icc=made)
        self.notes = _notes(image_format, info, metadata, self._colors)
        # Whether the whole image is encoded when its last row has come.
        self.encodes_at_end = image_format.encoder_bytes is not None
        self.trims_heap = image_format.trims_heap
        self._format, self._info, self._size = image_format, info, size
        self._metadata, self._options, self._zero_alpha = metadata, options, zero_alpha

    def run(self, descriptor: int, path: Path) -> None:
        """Encode the PNG stream of a pipe descriptor to ``path``; raises `pyvips.Error`."""
        source = pyvips.Source.new_from_descriptor(descriptor)
        # unlimited, since the limits against hostile files would reject very wide rows, and this
        # stream is Lowtide's own.
        image = pyvips.Image.pngload_source(
            source, access="sequential", fail_on="error", unlimited=True
        )
        info = self._info
        if info.sample_type == "float32":
            image = image.bandfold(factor=4 * info.channels)
            image = image.copy(format="float", bands=info.channels)
        image = image.copy(interpretation=interpretation_of(info.channels, info.sample_type))
        if self._size != (info.width, info.height):
            image = resample_image(image, *self._size)
        if self._zero_alpha:
            image = image.extract_band(0, n=info.color_channels).bandjoin_const([0])
        stored, _note = output_sample(self._format, info.sample_type, info.value_range)
        image = convert_samples(image, stored, bits=self._format.bits, value_range=info.value_range)
        if self._colors > info.color_channels:
            gray, *alpha = image.bandsplit()
            space = interpretation_of(self._colors, stored)
            image = gray.bandjoin([gray, gray, *alpha]).copy(interpretation=space)
        image = attach_metadata(image, self._metadata)
        keep, unit = keep_flags(self._metadata), self._metadata.unit
        details = SaveDetails(keep, unit, self._zero_alpha)
        assert self._format.save is not None
        self._format.save(image, str(path), self._options, details)
        correct_head(path, self._format, self._metadata)


def _notes(
    image_format: ImageFormat, info: ImageInfo, metadata: ImageMetadata, colors: int
) -> tuple[str, ...]:
    notes: list[str] = []
    _stored, rounding = output_sample(image_format, info.sample_type, info.value_range)
    if rounding:
        notes.append(rounding)
    if metadata.icc is not None and metadata.profile_for(colors) is None:
        notes.append("the ICC profile is for another number of color channels and is not written")
    if metadata.exif is not None and "exif" not in image_format.metadata_kinds:
        notes.append(f"{image_format.name} files are written without EXIF")
    if metadata.texts and image_format is not PNG:
        keys = list(metadata.texts)
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        notes.append(f"{image_format.name} files are written without the texts of a PNG: {named}")
    if metadata.iptc is not None and "iptc" not in image_format.metadata_kinds:
        notes.append(f"{image_format.name} files are written without IPTC")
    return tuple(notes)


class UncompressedPngWriter:
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


def require_room_for_encoder(name: str) -> None:
    """Raise `OutOfMemoryError` if the system refuses the memory that an encoder begins with."""
    size = _THREADS * _stack_bytes() + _ROWS_AND_TILES
    try:
        # Private, as stacks are: what is shared does not count.
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError) as error:
        raise OutOfMemoryError(
            f"{name}: there is no memory for its encoder, whose threads and rows take up to"
            f" {format_bytes(size)} of addresses ({error})",
            hint="raise the limit of this process (ulimit -d, ulimit -v), or pass a smaller"
            " --budget so that the network leaves more",
        ) from error


def wait_until_read(descriptor: int, stopped: Callable[[], bool]) -> None:
    """Wait until a pipe is empty, or ``stopped`` returns True."""
    while _unread_bytes(descriptor) and not stopped():
        time.sleep(0.001)


def _unread_bytes(descriptor: int) -> int:
    """Return the bytes that wait in a pipe; 0 where the system does not tell."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return 0
    found = bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return struct.unpack("i", found)[0]


def _stack_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return _DEFAULT_STACK
    soft, _hard = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft


def correct_head(path: Path, image_format: ImageFormat, metadata: ImageMetadata) -> None:
    """Correct what the head of a file says, whose metadata are to be these; raises `OSError`."""
    if image_format is PNG:
        _correct_png(path, metadata)
    elif image_format is JPEG and metadata.has_resolution and metadata.exif is None:
        # Where EXIF is written, it has the resolution.
        sides = (min(max(round(one * 25.4), 1), 65_535) for one in (metadata.xres, metadata.yres))
        jfif = b"JFIF\0\1\1\1" + struct.pack(">HH", *sides) + b"\0\0"
        _replace_bytes(path, 2, 0, b"\xff\xe0" + struct.pack(">H", 2 + len(jfif)) + jfif)
    elif image_format is TIFF and not metadata.has_resolution:
        _drop_tiff_resolution(path)


def _correct_png(path: Path, metadata: ImageMetadata) -> None:
    made = b"".join(metadata.texts.values())
    if metadata.codes is not None:
        data = b"cICP" + bytes([*metadata.codes, 0, 1])
        made += struct.pack(">L", len(data) - 4) + data + struct.pack(">L", zlib.crc32(data))
    if not metadata.has_resolution:
        place = _PNG_HEADER_END
        with path.open("rb") as file:
            while True:
                file.seek(place)
                size, name = struct.unpack(">L4s", file.read(8))
                if name in (b"pHYs", b"IDAT"):
                    break
                place += size + 12
        if name == b"pHYs":
            _replace_bytes(path, place, size + 12, b"")
    if made:
        _replace_bytes(path, _PNG_HEADER_END, 0, made)


def _replace_bytes(path: Path, place: int, count: int, made: bytes) -> None:
    """Replace so many bytes of a file from ``place`` on, and move what is after them."""
    waiting, source = made, place + count
    with path.open("r+b") as file:
        file.seek(source)
        while block := file.read(_BLOCK):
            source += len(block)
            waiting += block
            # Nothing is overwritten that was not read.
            ready = waiting[: source - place]
            file.seek(place)
            file.write(ready)
            waiting, place = waiting[len(ready) :], place + len(ready)
            file.seek(source)
        file.seek(place)
        file.write(waiting)
        file.truncate()


def _drop_tiff_resolution(path: Path) -> None:
    """Remove the resolution's entries from the first directory of a TIFF."""
    with path.open("r+b") as file:
        head = file.read(16)
        order = "<" if head[:2] == b"II" else ">"
        big = struct.unpack_from(order + "H", head, 2)[0] == 43
        form, step, pointer = ("Q", 20, "Q") if big else ("H", 12, "L")
        (at,) = struct.unpack_from(order + pointer, head, 8 if big else 4)
        file.seek(at)
        (count,) = struct.unpack(order + form, file.read(struct.calcsize(form)))
        entries = [file.read(step) for _ in range(count)]
        rest = file.read(struct.calcsize(pointer))
        gone = (*_RESOLUTIONS, _UNIT)
        kept = [one for one in entries if struct.unpack_from(order + "H", one)[0] not in gone]
        file.seek(at)
        file.write(struct.pack(order + form, len(kept)) + b"".join(kept) + rest)
