"""How an image is encoded: the choices people have, and the libvips calls they turn into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pyvips

from lowtide.core.errors import UsageError
from lowtide.core.signal import ImageInfo
from lowtide.media import codec_memory
from lowtide.media.formats import AVIF, JPEG, PNG, TIFF, WEBP, ImageFormat, output_format

Subsampling = Literal["auto", "4:4:4", "4:2:0"]
TiffCompression = Literal["none", "lzw", "deflate"]

_PNG_FILTER_UP = 0x20
_SUBSAMPLING = {"auto": "auto", "4:4:4": "off", "4:2:0": "on"}
# Classic TIFF counts bytes in 32 bits; the rest is for directories, metadata and rows that
# compression makes larger.
_CLASSIC_TIFF_BYTES = 3_900_000_000
_STRIP_BYTES = 512 << 10


@dataclass(frozen=True)
class EncodeOptions:
    """Encoder settings; each concerns one format. Raises `UsageError` when out of range.

    ``png_compression`` 0 to 9, where 0 stores. ``jpeg_quality``, ``webp_quality`` and
    ``avif_quality`` 1 to 100. ``jpeg_subsampling`` ``auto`` keeps full color resolution from
    quality 90 up. ``webp_lossless`` ignores the quality and keeps every pixel, also under full
    transparency. ``avif_effort`` 0 (fast) to 9, where
    4 and more take several times as long. ``tiff_compression`` is lossless always.
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
                    f"{name} {getattr(self, name)!r} is not known", hint=f"one of {allowed}"
                )


@dataclass(frozen=True)
class OutputCost:
    """Upper bound on the host memory an encoder takes, in bytes, what it takes as a rule, and what
    it is for."""

    resident_bytes: int
    usual_bytes: int
    why: str


def output_cost(
    path: Path | str,
    info: ImageInfo,
    options: EncodeOptions | None = None,
    *,
    resized_from: ImageInfo | None = None,
    otherwise: str | None = None,
) -> OutputCost:
    """What encoding an image like ``info`` into ``path`` takes besides the rows given to it.

    ``info`` is the image in the file, and ``resized_from`` the rows it is resampled from if it
    is. ``otherwise`` names the format of a ``path`` without suffix. Raises `UsageError` for a
    suffix that names no supported format.
    """
    chosen = options or EncodeOptions()
    entry = output_format(path, otherwise)
    price = codec_memory.encoding_window(info, strips=entry is TIFF)
    if resized_from is not None:
        price += codec_memory.resize_bytes(resized_from)
    why = f"a {entry.name} is encoded by rows"
    if entry is WEBP:
        price += codec_memory.webp_encoding(info, lossless=chosen.webp_lossless)
        why = "a WebP is encoded as a whole"
    elif entry is AVIF:
        price += codec_memory.avif_encoding(
            info, quality=chosen.avif_quality, effort=chosen.avif_effort
        )
        why = "an AVIF is encoded as a whole"
    return OutputCost(price.most, price.usual, why)


def encode_image(
    image: pyvips.Image,
    path: Path,
    entry: ImageFormat,
    options: EncodeOptions,
    *,
    keep: int,
    unit: str,
    hidden: bool = False,
) -> None:
    """Encode ``image`` to ``path`` in the format ``entry``, whatever the name ends with.

    ``image`` already has a sample type of the format; ``keep`` is the libvips flags of the
    metadata to write and ``unit`` that of the resolution. ``hidden`` color, under no opacity, is
    kept by formats that would rather drop it. Raises `pyvips.Error`.
    """
    name = str(path)
    if entry is PNG:
        # Enlarged images are smooth: against no filter, "up" halves the file at the same speed.
        image.pngsave(name, compression=options.png_compression, filter=_PNG_FILTER_UP, keep=keep)
    elif entry is JPEG:
        mode = _SUBSAMPLING[options.jpeg_subsampling]
        image.jpegsave(name, Q=options.jpeg_quality, subsample_mode=mode, keep=keep)
    elif entry is WEBP:
        image.webpsave(
            name,
            Q=options.webp_quality,
            lossless=options.webp_lossless,
            exact=options.webp_lossless or hidden,
            keep=keep,
        )
    elif entry is AVIF:
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
        predictor="float" if sample == 4 else "horizontal",
        # Who writes and who reads a TIFF holds whole strips of it.
        tile_height=_strip_rows(image.width * image.bands * sample),
        bigtiff=raw > _CLASSIC_TIFF_BYTES,
        resunit="cm" if unit == "cm" else "inch",
        keep=keep,
    )


def _strip_rows(row_bytes: int) -> int:
    """Rows of a strip: as many as `_STRIP_BYTES` hold, in multiples of 8."""
    return min(max(_STRIP_BYTES // row_bytes // 8, 1), 16) * 8
