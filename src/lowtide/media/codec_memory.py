"""Host memory models of the image codecs, fitted to measurements.

Measured in fresh processes at several sizes. Every estimate has an upper bound on the growth of the
process's peak resident memory, and a typical value. Formats that are read or written by rows take a
window of rows. The others hold a frame; their bytes per pixel cover the frame and the codec's
working planes.

One model for several formats would have bounds that are 29 to 400 % wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.core.heap import heap_is_tuned
from lowtide.media._libvips import shrink_row_windows
from lowtide.media.image_info import ImageInfo


@dataclass(frozen=True)
class CodecBytes:
    """Bytes of host memory: upper bound ``upper`` and typical value ``typical``."""

    upper: int
    typical: int

    def __add__(self, other: CodecBytes) -> CodecBytes:
        """Return the sum, for memory held at the same time."""
        return CodecBytes(self.upper + other.upper, self.typical + other.typical)


# Rows that a stage of libvips keeps, in small windows and in its own ones, where they could not be
# shrunk: at most, by sample type for reading and resampling,
_READ_ROWS = {"uint8": (480, 1400), "uint16": (390, 1400), "float32": (690, 1400)}
_RESIZE_ROWS = {"uint8": (380, 1100), "uint16": (460, 1100), "float32": (620, 1100)}
_WRITE_ROWS, _STRIPS_ROWS = (140, 704), (260, 1400)
# and typically.
_READ_TYPICAL, _WRITE_TYPICAL, _STRIPS_TYPICAL = (100, 1260), (130, 630), (100, 1260)
# Bytes in addition to rows: a bound, rarely reached, and a typical value.
_READ_BYTES = 4 << 20, 256 << 10
_WRITE_BYTES, _STRIPS_BYTES = (8 << 20, 1 << 20), (8 << 20, 2 << 20)
# Typical share of the bound, for rows read in strips or tiles, and for frames.
_STRIP_ROWS_TYPICAL, _FRAME_TYPICAL = 0.9, 0.7

# Bytes per pixel, by channels or by sample type.
# A WebP is decoded into two canvases and a frame, of which two are held at once; where the heap
# keeps the blocks of an alpha channel that was read before, it takes more.
_WEBP_DECODE, _WEBP_DECODE_TWICE = 8.6, 24.0
_AVIF_DECODE, _AVIF_DECODE_TYPICAL = {"uint8": 20.5, "uint16": 27.0}, 0.85
# By (lossless, alpha): upper in noise of full scale, typical in photographs, bytes for any image.
# Without alpha the file that grows in memory comes in addition, with what it was when it last
# doubled: at most 3 bytes a pixel up to quality 90, and 9.4 at 100. An alpha channel, always coded
# losslessly, is coded before there is a file.
_WEBP_ENCODE = {
    (False, False): (4.8, 4.8, 0),
    (False, True): (38.0, 22.0, 2 << 20),
    (True, False): (38.5, 34.0, 13 << 20),
    (True, True): (39.5, 34.0, 25 << 20),
}
_WEBP_FILE, _WEBP_LARGE_FILE, _LARGE_QUALITY = 3.0, 9.4, 90
_WEBP_FILE_TYPICAL = 0.25
_AVIF_ENCODE = {(8, False): 45.0, (8, True): 72.0, (12, False): 66.0, (12, True): 100.0}
# From this quality up the AVIF encoder does not subsample chroma.
_AVIF_FULL_COLOR, _AVIF_FULL_COLOR_FACTOR = 90, 1.45
# What the quality 100 takes in addition in noise of full scale, whose file is 4 bytes a pixel and
# more; and what the encoder takes for any image. A decoder has the file twice.
_AVIF_LARGE_FILE, _AVIF_CONSTANT, _AVIF_FILE_COPIES = 18.0, 12 << 20, 2
# Up to this effort it makes a single pass.
_AVIF_FAST_EFFORT, _AVIF_FAST_FACTOR = 3, 0.68


def row_window_bytes(info: ImageInfo) -> CodecBytes:
    """Return the memory of decoding an image by rows."""
    rows = _of_windows(_READ_ROWS[info.sample_type]), _of_windows(_READ_TYPICAL)
    return _by_rows(info, rows, _READ_BYTES)


def strip_window_bytes(info: ImageInfo, tile_height: int) -> CodecBytes:
    """Return the memory of decoding strips, or tiles of a height in pixels.

    It is at least `row_window_bytes`.
    """
    kept = max(_of_windows(_READ_ROWS[info.sample_type]), 2 * tile_height + 256)
    return _by_rows(info, (kept, int(kept * _STRIP_ROWS_TYPICAL)), _READ_BYTES)


def whole_image_bytes(nbytes: int) -> CodecBytes:
    """Return the memory of planes of up to ``nbytes``, of an image or a part of it."""
    return CodecBytes(nbytes, int(nbytes * _FRAME_TYPICAL))


def mapped_file_bytes(nbytes: int) -> CodecBytes:
    """Return the memory of a memory-mapped file, whose pages the system can reclaim."""
    return CodecBytes(nbytes, 0)


def jpeg_coefficients(info: ImageInfo, bands: int, subsampling: str) -> CodecBytes:
    """Return the memory of a progressive JPEG's coefficients, two bytes per sample."""
    width, height = math.ceil(info.width / 16) * 16, math.ceil(info.height / 16) * 16
    samples = 1.5 if bands == 3 and subsampling == "4:2:0" else float(bands)
    return whole_image_bytes(int(2 * samples * width * height))


def webp_decoding(info: ImageInfo, file_bytes: int) -> CodecBytes:
    """Return the memory of decoding a WebP: the mapped file, canvases, and the frame."""
    twice = info.alpha and not heap_is_tuned()
    upper = _WEBP_DECODE_TWICE if twice else _WEBP_DECODE
    return CodecBytes(
        int(upper * info.pixels), int(_WEBP_DECODE * info.pixels)
    ) + mapped_file_bytes(file_bytes)


def avif_decoding(info: ImageInfo, file_bytes: int) -> CodecBytes:
    """Return the memory of decoding an AVIF: file, planes of decoder and libheif, and frame.

    Chroma is assumed not subsampled, since libvips does not read this from the header.
    """
    held = int(_AVIF_DECODE[info.sample_type] * info.pixels) + _AVIF_FILE_COPIES * file_bytes
    return CodecBytes(held, int(held * _AVIF_DECODE_TYPICAL))


def encoding_window(info: ImageInfo, *, strips: bool) -> CodecBytes:
    """Return the memory of the rows before an encoder, which may collect strips."""
    if strips or info.sample_type == "float32":
        rows = _of_windows(_STRIPS_ROWS), _of_windows(_STRIPS_TYPICAL)
        return _by_rows(info, rows, _STRIPS_BYTES)
    rows = _of_windows(_WRITE_ROWS), _of_windows(_WRITE_TYPICAL)
    return _by_rows(info, rows, _WRITE_BYTES)


def resize_bytes(info: ImageInfo) -> CodecBytes:
    """Return the memory of resampling rows in a pipeline, which is done in floats."""
    rows = _of_windows(_RESIZE_ROWS[info.sample_type])
    return whole_image_bytes(rows * info.width * info.channels * 4)


def webp_encoding(info: ImageInfo, *, quality: int, lossless: bool) -> CodecBytes:
    """Return the memory of encoding a WebP: frame, ``WebPPicture``, encoder tables, file."""
    upper, typical, constant = _WEBP_ENCODE[lossless, info.alpha]
    if not lossless and not info.alpha:
        file = _WEBP_FILE + _of_large_qualities(quality) * (_WEBP_LARGE_FILE - _WEBP_FILE)
        upper, typical = upper + file, typical + _WEBP_FILE_TYPICAL * file
    return CodecBytes(int(upper * info.pixels) + constant, int(typical * info.pixels) + constant)


def collected_frame(info: ImageInfo) -> CodecBytes:
    """Return the memory of the rows of a WebP or AVIF that wait to be encoded with the last one."""
    held = info.pixels * (3 + info.alpha) * (1 if info.sample_type == "uint8" else 2)
    return CodecBytes(held, held)


def avif_encoding(info: ImageInfo, *, quality: int, effort: int) -> CodecBytes:
    """Return the memory of encoding an AVIF: frame, planes, and the encoder's frames."""
    bytes_per_pixel = _AVIF_ENCODE[8 if info.sample_type == "uint8" else 12, info.alpha]
    if quality >= _AVIF_FULL_COLOR:
        bytes_per_pixel *= _AVIF_FULL_COLOR_FACTOR
    if effort <= _AVIF_FAST_EFFORT:
        bytes_per_pixel *= _AVIF_FAST_FACTOR
    usual = int(bytes_per_pixel * info.pixels * _FRAME_TYPICAL) + _AVIF_CONSTANT
    bytes_per_pixel += _AVIF_LARGE_FILE * _of_large_qualities(quality)
    return CodecBytes(int(bytes_per_pixel * info.pixels) + _AVIF_CONSTANT, usual)


def _of_large_qualities(quality: int) -> float:
    """Return where a quality is from 90, below which noise makes small files, to 100: 0..1."""
    return max(0, quality - _LARGE_QUALITY) / (100 - _LARGE_QUALITY)


def _of_windows(rows: tuple[int, int]) -> int:
    return rows[not shrink_row_windows()]


def _by_rows(info: ImageInfo, rows: tuple[int, int], extra: tuple[int, int]) -> CodecBytes:
    """Return the memory of rows and constant bytes, each as bound and typical value.

    Each stage of a pipeline has its own window, so that an image with few rows is held up to three
    times.
    """
    upper, typical = min(rows[0], 3 * info.height), min(rows[1], info.height)
    return CodecBytes(upper * info.row_bytes + extra[0], typical * info.row_bytes + extra[1])
