"""Facts about a camera RAW file: sensor, levels, and the memory of reading and developing it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from lowtide.core.errors import ImageError, UsageError
from lowtide.core.input_file import require_input
from lowtide.media import codec_memory
from lowtide.media.encode import EncodeOptions
from lowtide.media.formats import JPEG, PNG, TIFF, WEBP, require_format_holds
from lowtide.media.image_facts import ImageFacts
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import EncodingMemory, output_cost
from lowtide.media.raw_file import DevelopedFrame, RawFile

RawOutput = Literal["linear", "developed", "mosaic"]

# LibRaw develops in four values of two bytes a pixel, and in tiles of 512 pixels a side whose
# buffers each thread has.
_DEVELOPING, _TILES = 8, 16 << 20
_DECODING = 1.25  # of the values, with what decoders hold
_XTRANS_SIDE = 512  # below which LibRaw does not develop X-Trans

# Means of this many places a side have a sixteenth of the noise, so that the darkest of them is not
# below black by more than a tenth of it, whatever the ISO. A doubled black level is twice too high.
_SIDE = 16
_DARKEST = 0.1  # percent of the means
_BELOW_BLACK = 0.75
# A difference that matters, as a share of white: less than a thousandth is a sensor's drift.
_DRIFT = 1e-3
# Without a black level in the file: one of 64 in 12 bits is 1.6 % of white, one of 64 in 10 bits
# 6 %, and noise reaches down to half of that; in files that really begin at 0 a few pixels are near
# it. One in a million may be dead.
_LOWEST = 1e-6
_OFFSET = 5e-3
_BRIGHT = 0.999
_BAND = 1 << 20


@dataclass(frozen=True)
class RawFacts(ImageFacts):
    """`ImageFacts` of a camera RAW file, whose ``info`` is the undeveloped mosaic.

    Attributes:
        colors: Letter of each place of the filter array, row by row; ``RGB`` without one, or
            ``gray``.
        black_levels: Black level of each place or color, in levels of the file.
        white: White level.
        iso: ISO of the file, or None.
        levels: Levels that its data have.
        frame: What part of the development is the picture.
        is_xtrans: Whether the filter array is one of 6 × 6.
    """

    colors: str
    period: int
    black_levels: tuple[float, ...]
    white: float
    iso: int | None
    levels: RawLevels
    frame: DevelopedFrame
    is_xtrans: bool

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the values: (H, W), or (H, W, 3) without a filter array."""
        info = self.info
        return info.shape if info.channels == 3 else info.shape[:2]

    @property
    def black(self) -> float:
        """Mean of the black levels."""
        return sum(self.black_levels) / len(self.black_levels)

    @property
    def range(self) -> float:
        """Levels from black to white."""
        return self.white - self.black


def inspect_raw(path: Path, *, max_pixels: int, black_level: float | None = None) -> RawFacts:
    """Return the facts of a RAW file, which is decoded for them.

    Raises:
        ImageError: It cannot be read, is larger than ``max_pixels``, or its black level does not
            suit its data.
    """
    state = require_input(path, ImageError)
    return _inspect(path, max_pixels, black_level, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _inspect(
    path: Path, max_pixels: int, black_level: float | None, _changed: int, file_bytes: int
) -> RawFacts:
    raw = RawFile(path, black_level)
    try:
        height, width, *colors = raw.values.shape
        if height * width > max_pixels:
            raise ImageError(
                f"{path}: {width:,} x {height:,} is {width * height:,} pixels and the limit is"
                f" {max_pixels:,}",
                hint=f"--max-pixels {width * height} if this size is intended",
            )
        levels = measure_levels(raw)
        notes = black_level_notes(raw, levels, given=black_level is not None)
        info = ImageInfo(width, height, colors[0] if colors else 1, "uint16")
        held = int(raw.held_bytes * _DECODING)
        cost = codec_memory.CodecBytes(held + file_bytes, held)
        return RawFacts(
            info=info,
            format=TIFF.name,
            orientation=1,
            resident_bytes=cost.upper,
            typical_bytes=cost.typical,
            scratch_bytes=0,
            reason="a camera RAW file is decoded as a whole",
            notes=tuple(notes),
            colors="".join(raw.names[int(color)] for color in raw.colors.flat),
            period=len(raw.colors) if raw.colors.ndim == 2 else 1,
            black_levels=tuple(map(float, raw.black.flat)),
            white=raw.white,
            iso=raw.iso,
            levels=levels,
            frame=raw.frame,
            is_xtrans=raw.is_xtrans,
        )
    finally:
        raw.close()


@dataclass(frozen=True)
class RawOutputFacts:
    """What is written of a RAW file: ``info`` of the image, its format, and the memory it takes."""

    output: RawOutput
    info: ImageInfo
    format: str
    writing: EncodingMemory


def raw_result(
    facts: RawFacts,
    source: Path,
    target: Path,
    output: RawOutput | Literal["auto"],
    options: EncodeOptions,
    default_format: str | None,
) -> RawOutputFacts:
    """Return what is written of a RAW file to ``target``; ``auto`` goes by its format.

    Raises:
        UsageError: The format has no 16 bits, and the output needs them.
        ImageError: LibRaw does not develop such files.
        OutputError: The format cannot hold the result.
    """
    entry = require_format_holds(target, facts.info, default_format or facts.format)
    if output == "auto":
        output = "linear" if entry is TIFF else "developed"
    if output != "developed" and entry not in (TIFF, PNG):
        raise UsageError(
            f"{target}: {entry.name} does not hold the 16 bits of --raw-output {output}",
            hint=f"name a TIFF: -o {target.with_suffix('.tif')}, or --raw-output developed",
        )
    if output == "mosaic":
        writing = output_cost(target, facts.info, options, default_format=entry.name)
        return RawOutputFacts(output, facts.info, entry.name, writing)
    width, height = facts.frame.size
    if facts.is_xtrans and min(width, height) < _XTRANS_SIDE:
        raise ImageError(
            f"{source}: LibRaw develops X-Trans files only from {_XTRANS_SIDE} × {_XTRANS_SIDE}"
            f" pixels on, and this one has {width} × {height}",
            hint="--raw-output mosaic writes the sensor's values",
        )
    bits = 1 if entry in (JPEG, WEBP) else 2
    colors = 1 if facts.colors == "gray" else 3
    info = ImageInfo(width, height, colors, "uint8" if bits == 1 else "uint16")
    require_format_holds(target, info, entry.name)
    encoding = output_cost(target, info, options, default_format=entry.name)
    pixels = facts.frame.height * facts.frame.width
    picture = pixels * (_DEVELOPING + 3 * bits) + _TILES
    threads = _TILES * ((os.cpu_count() or 1) - 1)
    writing = EncodingMemory(
        encoding.resident_bytes + picture + threads,
        encoding.typical_bytes + picture,
        "LibRaw develops the whole image",
    )
    return RawOutputFacts(output, info, entry.name, writing)


@dataclass(frozen=True)
class RawLevels:
    """Levels that the data of a RAW file have.

    Attributes:
        lowest: Level that all but a millionth of the pixels reach.
        darkest: Mean of the darkest parts, of the shape of `RawFile.black`.
        bright: Level that a thousandth of the pixels exceeds.
        saturated: Share of pixels at the white level or above.
    """

    lowest: int
    darkest: np.ndarray
    bright: int
    saturated: float


def measure_levels(raw: RawFile) -> RawLevels:
    """Return the levels of a file, read in bands."""
    counts = np.zeros(1 << 16, np.int64)
    means: list[np.ndarray] = []
    for band in _bands(raw):
        counts += np.bincount(band.ravel(), minlength=1 << 16)
        means += _block_means(band, raw.black)
    sums = np.cumsum(counts)
    lowest, bright = np.searchsorted(sums, [_LOWEST * sums[-1], _BRIGHT * sums[-1]], "right")
    saturated = 1 - sums[int(np.ceil(raw.white)) - 1] / sums[-1]
    darkest = np.percentile(np.concatenate(means), _DARKEST, axis=0)
    return RawLevels(int(lowest), darkest, int(bright), float(saturated))


def black_level_notes(raw: RawFile, levels: RawLevels, *, given: bool) -> list[str]:
    """Return notes on the black level, which was ``given`` or is the file's.

    Raises:
        ImageError: It stands clearly above the darkest parts of the data, or is 0 and the data
            stand clearly above that.
    """
    above = raw.black - levels.darkest
    wrong = (levels.darkest < _BELOW_BLACK * raw.black) & (above > _DRIFT * raw.white)
    if wrong.any():
        place = np.unravel_index(np.argmax(np.where(wrong, above, -np.inf)), above.shape)
        black, dark = raw.black[place], levels.darkest[place]
        raise ImageError(
            f"{raw.path}: the black level is {black:g}, and the darkest parts of the data are at"
            f" {dark:.0f}" + ("" if given else ": it may be doubled"),
            hint=f"give the right one: --black-level {black / 2:.0f}, or at most {dark:.0f}",
        )
    if given or raw.black.any():
        return []
    if levels.lowest > _OFFSET * raw.white:
        raise ImageError(
            f"{raw.path}: the black level is 0, and the data begin at {levels.lowest} of"
            f" {raw.white:g}: it is not in the file",
            hint=f"give it: --black-level {levels.lowest}, or --black-level 0 if it is right",
        )
    if levels.lowest:
        return [
            f"the file says black level 0, and its data begin at {levels.lowest} of"
            f" {raw.white:g}; --black-level N sets it"
        ]
    return []


def _bands(raw: RawFile) -> Iterator[np.ndarray]:
    """Yield bands of rows that begin at the filter array's first place, the last one shorter."""
    height, width = raw.values.shape[:2]
    rows = _period(raw.black) * _SIDE
    rows *= max(1, _BAND // (rows * width))
    for top in range(0, height, rows):
        yield raw.values[top : top + rows]


def _block_means(band: np.ndarray, black: np.ndarray) -> list[np.ndarray]:
    """Return the means (N, ``*black.shape``) of blocks of a band, by place or color."""
    period = _period(black)
    places = band.shape[0] // period, band.shape[1] // period
    sides = [min(_SIDE, count) for count in places]
    if not all(sides):
        return []
    counts = [count // side for count, side in zip(places, sides, strict=True)]
    (rows, columns), (high, wide) = counts, sides
    used = band[: rows * high * period, : columns * wide * period]
    blocks = used.reshape(rows, high, period, columns, wide, period, -1)
    means = blocks.mean((1, 4), dtype=np.float64)  # (rows, period, columns, period, colors)
    return [means.transpose(0, 2, 1, 3, 4).reshape(-1, *black.shape)]


def _period(black: np.ndarray) -> int:
    return len(black) if black.ndim == 2 else 1
