"""Supported image formats with their limits, sample types and metadata."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lowtide.core.errors import OutputError, UsageError
from lowtide.media.image_info import ImageInfo, SampleType, ValueRange


@dataclass(frozen=True)
class ImageFormat:
    """Capabilities of one image format, as the bundled encoder writes it.

    ``loader`` is the libvips operation that reads it, empty if there is none. ``max_side`` is in
    pixels. ``samples`` are the sample types it stores; ``bits`` is the maximum bits of an integer
    sample. ``gray`` is false if a gray image is stored as RGB. ``metadata_kinds`` names the
    metadata that is written, among ``icc``, ``exif``, ``xmp``, ``iptc`` and ``resolution``.
    """

    name: str
    loader: str
    suffixes: tuple[str, ...]
    max_side: int
    samples: tuple[SampleType, ...]
    bits: int
    alpha: bool
    gray: bool
    metadata_kinds: frozenset[str]


# Maximum sides are those of the bundled encoders, less than some file formats allow:
# libvips stops at 10**8, libjpeg at 65,500 and the AVIF writer at 16,384.
PNG = ImageFormat(
    "PNG",
    "pngload",
    (".png",),
    10**8,
    ("uint8", "uint16"),
    16,
    True,
    True,
    frozenset({"icc", "exif", "xmp", "resolution"}),
)
JPEG = ImageFormat(
    "JPEG",
    "jpegload",
    (".jpg", ".jpeg", ".jpe", ".jfif"),
    65_500,
    ("uint8",),
    8,
    False,
    True,
    frozenset({"icc", "exif", "xmp", "iptc", "resolution"}),
)
WEBP = ImageFormat(
    "WebP",
    "webpload",
    (".webp",),
    16_383,
    ("uint8",),
    8,
    True,
    False,
    frozenset({"icc", "exif", "xmp"}),
)
TIFF = ImageFormat(
    "TIFF",
    "tiffload",
    (".tif", ".tiff"),
    10**8,
    ("uint8", "uint16", "float32"),
    16,
    True,
    True,
    frozenset({"icc", "xmp", "iptc", "resolution"}),
)
AVIF = ImageFormat(
    "AVIF",
    "heifload",
    (".avif",),
    16_384,
    ("uint8", "uint16"),
    12,
    True,
    False,
    frozenset({"icc", "exif", "xmp"}),
)

# Formats that are only read; their results are PNGs where no other format is named.
GIF = replace(PNG, name="GIF", loader="gifload", suffixes=(".gif",))
BMP = replace(PNG, name="BMP", loader="", suffixes=(".bmp", ".dib"))
HEIC = replace(PNG, name="HEIC", loader="", suffixes=(".heic", ".heif", ".hif"))
READ_ONLY: tuple[ImageFormat, ...] = (GIF, BMP, HEIC)

FORMATS: tuple[ImageFormat, ...] = (PNG, JPEG, WEBP, TIFF, AVIF)
_BY_SUFFIX = {suffix: entry for entry in FORMATS for suffix in entry.suffixes}
SUFFIXES: tuple[str, ...] = tuple(_BY_SUFFIX)
READ_SUFFIXES: tuple[str, ...] = tuple(one for entry in READ_ONLY for one in entry.suffixes)


def format_of_suffix(suffix: str) -> ImageFormat | None:
    """Return the format of a suffix, or None; case and leading dot do not matter."""
    return _BY_SUFFIX.get("." + suffix.lower().lstrip("."))


def unsupported_format_error(what: str) -> UsageError:
    """Build the error for a suffix or format name that Lowtide does not write."""
    return UsageError(
        f"{what} names no image format that Lowtide writes",
        hint=f"use one of {', '.join(SUFFIXES)}",
    )


def output_format(path: Path | str, default_format: str | None = None) -> ImageFormat:
    """Return the output format by the suffix of ``path``.

    Without a suffix it is the format named ``default_format``. Raises `UsageError` for an
    unsupported format.
    """
    target = Path(path)
    entry = format_of_suffix(target.suffix or default_format or ".")
    if entry is None:
        ending = f"the suffix {target.suffix!r}" if target.suffix else "no suffix"
        raise unsupported_format_error(f"{target}: {ending}")
    return entry


def check_output(
    path: Path | str, info: ImageInfo, default_format: str | None = None
) -> ImageFormat:
    """Check that the format of ``path`` can hold an image; return the format.

    Without a suffix it is the format named ``default_format``. Raises `UsageError` for a suffix of
    no supported format, and `OutputError` for an image that the format cannot hold: too wide, too
    high, or with an alpha channel that it lacks.
    """
    image_format = output_format(path, default_format)
    if info.alpha and not image_format.alpha:
        raise OutputError(
            f"{path}: {image_format.name} cannot store transparency and the image has an alpha"
            " channel",
            hint="write PNG, WebP, TIFF or AVIF",
        )
    if max(info.width, info.height) > image_format.max_side:
        raise OutputError(
            f"{path}: the image is {info.width:,} x {info.height:,} pixels and {image_format.name} "
            f"holds at most {image_format.max_side:,} on a side",
            hint=f"write {_formats_for(info)}",
        )
    return image_format


def _formats_for(info: ImageInfo) -> str:
    side = max(info.width, info.height)
    names = [f.name for f in FORMATS if side <= f.max_side and (f.alpha or not info.alpha)]
    lossless_first = sorted(names, key=lambda name: name not in (PNG.name, TIFF.name))
    return " or ".join(lossless_first) if lossless_first else "a smaller image"


def output_sample(
    image_format: ImageFormat, sample: SampleType, known: ValueRange | None = None
) -> tuple[SampleType, str | None]:
    """Return the sample type that a format stores for ``sample`` of a known range, and the loss.

    The second value is a message about the loss, or None if every level is kept. Compression
    losses are not counted.
    """
    if sample in image_format.samples and (sample != "uint16" or image_format.bits == 16):
        return sample, None
    stored: SampleType = "uint8" if image_format.bits == 8 else "uint16"
    holds = f"{image_format.name} stores {image_format.bits} bits per sample"
    if sample == "float32":
        ends = "0..1" if known is None else f"{known.low:.6g}..{known.white:.6g}"
        return stored, f"{holds}; the float samples are clipped to {ends} and rounded"
    if image_format.bits < 16 and stored == "uint16":
        holds = f"AVIF holds at most {image_format.bits} bits per sample"
    if known is not None and known.white < (1 << image_format.bits):
        return stored, None
    return stored, f"{holds}; the 16-bit samples are rounded"
