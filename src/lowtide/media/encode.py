"""Encoder settings, encoder memory, and the libvips calls that encode an image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pyvips

from lowtide.core.errors import UsageError
from lowtide.media import codec_memory
from lowtide.media.formats import AVIF, JPEG, PNG, TIFF, WEBP, ImageFormat, output_format
from lowtide.media.image_info import ImageInfo

Subsampling = Literal["auto", "4:4:4", "4:2:0"]
TiffCompression = Literal["none", "lzw", "deflate"]

_PNG_FILTER_UP = 0x20
# Lossy WebP: from 3 up the encoder keeps every coefficient of the image, 7 to 30 bytes a pixel by
# content, where this takes 5. Files of quality 90 are 2 % larger, with .2 to .3 dB less.
_LOSSY_WEBP_EFFORT, _LOSSLESS_WEBP_EFFORT = 2, 4
_SUBSAMPLING = {"auto": "auto", "4:4:4": "off", "4:2:0": "on"}
# Classic TIFF has 32-bit offsets; the margin is for directories, metadata and rows that
# compression enlarges.
_CLASSIC_TIFF_BYTES = 3_900_000_000
_STRIP_BYTES = 512 << 10


@dataclass(frozen=True)
class EncodeOptions:
    """Encoder settings, each for one format; `UsageError` if out of range.

    ``png_compression`` is 0 (none) to 9. ``jpeg_quality``, ``webp_quality`` and ``avif_quality``
    are 1 to 100. ``jpeg_subsampling`` ``auto`` keeps full chroma resolution from quality 90 up.
    ``webp_lossless`` ignores the quality and keeps every pixel, also where alpha is 0.
    ``avif_effort`` is 0 (fast) to 9, where 4 and more take several times as long.
    ``tiff_compression`` is always lossless.
    """

    png_compression: int = 3
    jpeg_quality: int = 95
    jpeg_subsampling: Subsampling = "auto"
    webp_quality: int = 90
    webp_lossless: bool = False
    avif_quality: int = 80
    avif_effort: int = 3
    tiff_compression: TiffCompression = "deflate"

    def __post_init__(self) -> None:
        ranges = {
            "png_compression": (0, 9),
            "jpeg_quality": (1, 100),
            "webp_quality": (1, 100),
            "avif_quality": (1, 100),
            "avif_effort": (0, 9),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} must be a whole number from {low} to {high}: {value!r}")
        for name, allowed in (
            ("jpeg_subsampling", get_args(Subsampling)),
            ("tiff_compression", get_args(TiffCompression)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}", hint=f"one of {allowed}"
                )


@dataclass(frozen=True)
class OutputCost:
    """Host memory of an encoder in bytes: upper bound, typical value, and the reason.

    ``collecting`` is what it has until the last row, where the image is encoded only then, when
    nothing is read any more; None where it is encoded as the rows come.
    """

    resident_bytes: int
    typical_bytes: int
    reason: str
    collecting: codec_memory.CodecBytes | None = None


def output_cost(
    path: Path | str,
    info: ImageInfo,
    options: EncodeOptions | None = None,
    *,
    resized_from: ImageInfo | None = None,
    default_format: str | None = None,
) -> OutputCost:
    """Predict the host memory of encoding an image, without the rows given to it.

    Args:
        path: Output file, whose suffix names the format.
        info: The image in the file.
        options: Encoder settings.
        resized_from: The rows that the image is resampled from, if it is.
        default_format: Format of a ``path`` without suffix.

    Raises:
        UsageError: For a suffix of no supported format.
    """
    chosen = options or EncodeOptions()
    entry = output_format(path, default_format)
    cost = codec_memory.encoding_window(info, strips=entry is TIFF)
    settled = codec_memory.CodecBytes(cost.typical, cost.typical)  # once all rows have come
    if resized_from is not None:
        resizing = codec_memory.resize_bytes(resized_from)
        cost, settled = cost + resizing, settled + resizing
    if entry not in (WEBP, AVIF):
        return OutputCost(cost.upper, cost.typical, f"a {entry.name} is encoded by rows")
    if entry is WEBP:
        encoder = codec_memory.webp_encoding(
            info, quality=chosen.webp_quality, lossless=chosen.webp_lossless
        )
    else:
        encoder = codec_memory.avif_encoding(
            info, quality=chosen.avif_quality, effort=chosen.avif_effort
        )
    collecting, encoding = cost + codec_memory.collected_frame(info), settled + encoder
    return OutputCost(
        max(collecting.upper, encoding.upper),
        max(collecting.typical, encoding.typical),
        f"{'a WebP' if entry is WEBP else 'an AVIF'} is encoded as a whole",
        collecting,
    )


def encode_image(
    image: pyvips.Image,
    path: Path,
    image_format: ImageFormat,
    options: EncodeOptions,
    *,
    keep: int,
    unit: str,
    keep_hidden_color: bool = False,
) -> None:
    """Encode ``image`` to ``path`` as ``image_format``, whatever the suffix.

    ``image`` already has a sample type of the format. ``keep`` are the libvips flags of the
    metadata to write, ``unit`` is that of the resolution. ``keep_hidden_color`` keeps the color of
    pixels with alpha 0 in formats that drop it by default. Raises `pyvips.Error`.
    """
    name = str(path)
    if image_format is PNG:
        # Upscaled images are smooth: the filter "up" halves the file at the speed of no filter.
        image.pngsave(name, compression=options.png_compression, filter=_PNG_FILTER_UP, keep=keep)
    elif image_format is JPEG:
        mode = _SUBSAMPLING[options.jpeg_subsampling]
        image.jpegsave(name, Q=options.jpeg_quality, subsample_mode=mode, keep=keep)
    elif image_format is WEBP:
        image.webpsave(
            name,
            Q=options.webp_quality,
            lossless=options.webp_lossless,
            effort=_LOSSLESS_WEBP_EFFORT if options.webp_lossless else _LOSSY_WEBP_EFFORT,
            exact=options.webp_lossless or keep_hidden_color,
            keep=keep,
        )
    elif image_format is AVIF:
        image.heifsave(
            name,
            Q=options.avif_quality,
            compression="av1",
            bitdepth=AVIF.bits if str(image.format) == "ushort" else 8,
            effort=options.avif_effort,
            keep=keep,
        )
    else:
        _save_tiff(image, name, options, keep, unit)


def _save_tiff(
    image: pyvips.Image, name: str, options: EncodeOptions, keep: int, unit: str
) -> None:
    sample = {"uchar": 1, "ushort": 2, "float": 4}[str(image.format)]
    raw = image.width * image.height * image.bands * sample
    image.tiffsave(
        name,
        compression=options.tiff_compression,
        # Of floats a predictor is one that few readers know without further libraries.
        predictor="none" if sample == 4 else "horizontal",
        # Small strips, since writers and readers of a TIFF hold whole strips in memory.
        tile_height=_strip_rows(image.width * image.bands * sample),
        bigtiff=raw > _CLASSIC_TIFF_BYTES,
        resunit="cm" if unit == "cm" else "inch",
        keep=keep,
    )


def _strip_rows(row_bytes: int) -> int:
    """Return the rows of a strip of up to `_STRIP_BYTES`: a multiple of 8, 8 to 128."""
    return min(max(_STRIP_BYTES // row_bytes // 8, 1), 16) * 8
