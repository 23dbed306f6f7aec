"""Encoder settings, and the libvips calls that encode an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lowtide.core.errors import UsageError

if TYPE_CHECKING:
    import pyvips

Subsampling = Literal["auto", "4:4:4", "4:2:0"]
TiffCompression = Literal["none", "lzw", "deflate"]

AVIF_BITS = 12
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
class SaveDetails:
    """What beside the options determines how an image is saved.

    ``keep`` are the libvips flags of the metadata to write, ``unit`` is that of the resolution.
    ``keep_hidden_color`` keeps the color of pixels with alpha 0 in formats that drop it by default.
    """

    keep: int
    unit: str
    keep_hidden_color: bool = False


def save_png(image: pyvips.Image, name: str, options: EncodeOptions, details: SaveDetails) -> None:
    """Save a PNG; as all of this kind, of a sample type of the format. Raises `pyvips.Error`."""
    # Upscaled images are smooth: the filter "up" halves the file at the speed of no filter.
    image.pngsave(
        name, compression=options.png_compression, filter=_PNG_FILTER_UP, keep=details.keep
    )


def save_jpeg(image: pyvips.Image, name: str, options: EncodeOptions, details: SaveDetails) -> None:
    """Save a JPEG."""
    mode = _SUBSAMPLING[options.jpeg_subsampling]
    image.jpegsave(name, Q=options.jpeg_quality, subsample_mode=mode, keep=details.keep)


def save_webp(image: pyvips.Image, name: str, options: EncodeOptions, details: SaveDetails) -> None:
    """Save a WebP."""
    image.webpsave(
        name,
        Q=options.webp_quality,
        lossless=options.webp_lossless,
        effort=_LOSSLESS_WEBP_EFFORT if options.webp_lossless else _LOSSY_WEBP_EFFORT,
        exact=options.webp_lossless or details.keep_hidden_color,
        keep=details.keep,
    )


def save_avif(image: pyvips.Image, name: str, options: EncodeOptions, details: SaveDetails) -> None:
    """Save an AVIF, of 12 bits where the samples have 16."""
    image.heifsave(
        name,
        Q=options.avif_quality,
        compression="av1",
        bitdepth=AVIF_BITS if str(image.format) == "ushort" else 8,
        effort=options.avif_effort,
        keep=details.keep,
    )


def save_tiff(image: pyvips.Image, name: str, options: EncodeOptions, details: SaveDetails) -> None:
    """Save a TIFF in small strips."""
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
        resunit="cm" if details.unit == "cm" else "inch",
        keep=details.keep,
    )


def _strip_rows(row_bytes: int) -> int:
    """Return the rows of a strip of up to `_STRIP_BYTES`: a multiple of 8, 8 to 128."""
    return min(max(_STRIP_BYTES // row_bytes // 8, 1), 16) * 8
