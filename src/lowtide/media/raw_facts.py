"""Facts about a camera RAW file: sensor, levels, and the memory of reading and developing it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from lowtide.core.errors import ImageError, UsageError
from lowtide.media import codec_memory
from lowtide.media.encode import EncodeOptions, OutputCost, output_cost
from lowtide.media.formats import JPEG, PNG, TIFF, WEBP, check_output
from lowtide.media.image_facts import ImageFacts
from lowtide.media.image_info import ImageInfo
from lowtide.media.raw_file import RawFile, developed_size
from lowtide.media.raw_levels import RawLevels, check_levels, measure_levels

RawOutput = Literal["linear", "developed", "mosaic"]

# LibRaw develops in four values of two bytes a pixel, and in tiles of 512 pixels a side whose
# buffers each thread has.
_DEVELOPING, _TILES = 8, 16 << 20
_DECODING = 1.25  # of the values, with what decoders hold
_XTRANS_SIDE = 512  # below which LibRaw does not develop X-Trans


@dataclass(frozen=True)
class RawFacts(ImageFacts):
    """`ImageFacts` of a camera RAW file, whose ``info`` is the undeveloped mosaic.

    Attributes:
        colors: Letter of each place of the filter array, row by row, or ``RGB`` without one.
        black_levels: Black level of each place or color, in levels of the file.
        white: White level.
        iso: ISO of the file, or None.
        levels: Levels that its data have.
        developed: (W, H) of the upright picture.
        is_xtrans: Whether the filter array is one of 6 × 6.
    """

    colors: str
    period: int
    black_levels: tuple[float, ...]
    white: float
    iso: int | None
    levels: RawLevels
    developed: tuple[int, int]
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
    try:
        state = path.stat()
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
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
        notes = check_levels(raw, levels, given=black_level is not None)
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
            colors="".join(raw.names[color] for color in raw.colors.flat),
            period=len(raw.colors) if raw.colors.ndim == 2 else 1,
            black_levels=tuple(map(float, raw.black.flat)),
            white=raw.white,
            iso=raw.iso,
            levels=levels,
            developed=developed_size(raw),
            is_xtrans=raw.is_xtrans,
        )
    finally:
        raw.close()


@dataclass(frozen=True)
class RawResult:
    """What is written of a RAW file: ``info`` of the image, its format, and the memory it takes."""

    output: RawOutput
    info: ImageInfo
    format: str
    writing: OutputCost


def raw_result(
    facts: RawFacts,
    source: Path,
    target: Path,
    output: RawOutput | Literal["auto"],
    options: EncodeOptions,
    default_format: str | None,
) -> RawResult:
    """Return what is written of a RAW file to ``target``; ``auto`` goes by its format.

    Raises:
        UsageError: The format has no 16 bits, and the output needs them.
        ImageError: LibRaw does not develop such files.
        OutputError: The format cannot hold the result.
    """
    entry = check_output(target, facts.info, default_format or facts.format)
    if output == "auto":
        output = "linear" if entry is TIFF else "developed"
    if output != "developed" and entry not in (TIFF, PNG):
        raise UsageError(
            f"{target}: {entry.name} does not hold the 16 bits of --raw-output {output}",
            hint=f"name a TIFF: -o {target.with_suffix('.tif')}, or --raw-output developed",
        )
    if output == "mosaic":
        writing = output_cost(target, facts.info, options, default_format=entry.name)
        return RawResult(output, facts.info, entry.name, writing)
    width, height = facts.developed
    if facts.is_xtrans and min(width, height) < _XTRANS_SIDE:
        raise ImageError(
            f"{source}: LibRaw develops X-Trans files only from {_XTRANS_SIDE} × {_XTRANS_SIDE}"
            f" pixels on, and this one has {width} × {height}",
            hint="--raw-output mosaic writes the sensor's values",
        )
    bits = 1 if entry in (JPEG, WEBP) else 2
    info = ImageInfo(width, height, 3, "uint8" if bits == 1 else "uint16")
    check_output(target, info, entry.name)
    encoding = output_cost(target, info, options, default_format=entry.name)
    pixels = width * height
    picture = pixels * (_DEVELOPING + 3 * bits) + _TILES
    threads = _TILES * ((os.cpu_count() or 1) - 1)
    writing = OutputCost(
        encoding.resident_bytes + picture + threads,
        encoding.typical_bytes + picture,
        "LibRaw develops the whole image",
    )
    return RawResult(output, info, entry.name, writing)
