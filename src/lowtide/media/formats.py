"""Image formats: how a file is known, what it holds, and what writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.core.errors import OutputError, UsageError
from lowtide.media import codec_memory
from lowtide.media.codec_memory import CodecBytes
from lowtide.media.encode import (
    AVIF_BITS,
    EncodeOptions,
    SaveDetails,
    save_avif,
    save_jpeg,
    save_png,
    save_tiff,
    save_webp,
)
from lowtide.media.image_info import ImageInfo, SampleType, ValueRange


@dataclass(frozen=True)
class ImageFormat:
    """One image format: how a file of it is known, what it holds, and how it is written.

    Attributes:
        name: As it is called in messages.
        loader: The libvips operation that reads it, empty if there is none.
        suffixes: Those of its files, with their dots, in lower case.
        max_side: Pixels of the longest side.
        samples: Sample types that it stores.
        bits: Most bits of an integer sample.
        alpha: Whether it has transparency.
        gray: Whether a gray image is stored as one channel, not three.
        metadata_kinds: What is written of ``icc``, ``exif``, ``xmp``, ``iptc``, ``resolution``.
        begins: Whether a file is of this format, by its first 512 bytes.
        save: Saves a libvips image of one of ``samples``; None for a format that is only read.
        encoder_bytes: Memory of the encoder, where the image is encoded as a whole.
        decoder_bytes: Memory of the decoder by the size of the file, where it decodes as a whole.
        by_strips: Whether the encoder collects strips of rows.
        trims_heap: Whether it is encoded in a heap that gives blocks back; not where an encoder
            takes seconds, in which another image is computed.
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
    begins: Callable[[bytes], bool]
    save: Callable[[Any, str, EncodeOptions, SaveDetails], None] | None = None
    encoder_bytes: Callable[[ImageInfo, EncodeOptions], CodecBytes] | None = None
    decoder_bytes: Callable[[ImageInfo, int], CodecBytes] | None = None
    by_strips: bool = False
    trims_heap: bool = False

    @property
    def with_article(self) -> str:
        """The name with its article, for texts."""
        return f"{'an' if self.name[0] in 'AEIO' else 'a'} {self.name}"


def _brands(head: bytes) -> set[bytes]:
    """Return the brands of an ISO media file."""
    if head[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(head[:4], "big"), len(head))
    return {head[8:12], *(head[at : at + 4] for at in range(16, end - 3, 4))}


# Maximum sides are those of the bundled encoders, less than some file formats allow:
# libvips stops at 10**8, libjpeg at 65,500 and the AVIF writer at 16,384.
PNG = ImageFormat(
    name="PNG",
    loader="pngload",
    suffixes=(".png",),
    max_side=10**8,
    samples=("uint8", "uint16"),
    bits=16,
    alpha=True,
    gray=True,
    metadata_kinds=frozenset({"icc", "exif", "xmp", "resolution"}),
    begins=lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"),
    save=save_png,
)
JPEG = ImageFormat(
    name="JPEG",
    loader="jpegload",
    suffixes=(".jpg", ".jpeg", ".jpe", ".jfif"),
    max_side=65_500,
    samples=("uint8",),
    bits=8,
    alpha=False,
    gray=True,
    metadata_kinds=frozenset({"icc", "exif", "xmp", "iptc", "resolution"}),
    begins=lambda head: head.startswith(b"\xff\xd8\xff"),
    save=save_jpeg,
)
WEBP = ImageFormat(
    name="WebP",
    loader="webpload",
    suffixes=(".webp",),
    max_side=16_383,
    samples=("uint8",),
    bits=8,
    alpha=True,
    gray=False,
    metadata_kinds=frozenset({"icc", "exif", "xmp"}),
    begins=lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP",
    save=save_webp,
    encoder_bytes=lambda info, options: codec_memory.webp_encoding(
        info, quality=options.webp_quality, lossless=options.webp_lossless
    ),
    decoder_bytes=codec_memory.webp_decoding,
    trims_heap=True,
)
TIFF = ImageFormat(
    name="TIFF",
    loader="tiffload",
    suffixes=(".tif", ".tiff"),
    max_side=10**8,
    samples=("uint8", "uint16", "float32"),
    bits=16,
    alpha=True,
    gray=True,
    metadata_kinds=frozenset({"icc", "xmp", "iptc", "resolution"}),
    begins=lambda head: head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    save=save_tiff,
    by_strips=True,
)
AVIF = ImageFormat(
    name="AVIF",
    loader="heifload",
    suffixes=(".avif",),
    max_side=16_384,
    samples=("uint8", "uint16"),
    bits=AVIF_BITS,
    alpha=True,
    gray=False,
    metadata_kinds=frozenset({"icc", "exif", "xmp"}),
    begins=lambda head: bool(_brands(head) & {b"avif", b"avis"}),
    save=save_avif,
    encoder_bytes=lambda info, options: codec_memory.avif_encoding(
        info, quality=options.avif_quality, effort=options.avif_effort
    ),
    decoder_bytes=codec_memory.avif_decoding,
)

# Formats that are only read; their results are PNGs where no other format is named.
GIF = replace(
    PNG,
    name="GIF",
    loader="gifload",
    suffixes=(".gif",),
    begins=lambda head: head.startswith(b"GIF8"),
    save=None,
)
# Sizes of a BMP's second header, by which others that begin with BM are told from it.
_BMP_HEADERS = [size.to_bytes(4, "little") for size in (12, 40, 52, 56, 64, 108, 124)]
BMP = replace(
    GIF,
    name="BMP",
    loader="",
    suffixes=(".bmp", ".dib"),
    begins=lambda head: head.startswith(b"BM") and head[14:18] in _BMP_HEADERS,
)
_HEIC_BRANDS = {b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"}
HEIC = replace(
    GIF,
    name="HEIC",
    loader="",
    suffixes=(".heic", ".heif", ".hif"),
    begins=lambda head: bool(_brands(head) & _HEIC_BRANDS),
)

# All formats, in the order in which a file is compared with them, and their suffixes: first those
# of formats that are written.
FORMATS: list[ImageFormat] = []
WRITTEN_SUFFIXES: list[str] = []
SUFFIXES: list[str] = []


def add_format(added: ImageFormat) -> None:
    """Make Lowtide read files of a format, and write them where it has ``save``.

    Results keep its name, its samples and its metadata. For this process: workers of ``devices``
    have to add it too.
    """
    FORMATS.append(added)
    written = [one for one in FORMATS if one.save is not None]
    read = [one for one in FORMATS if one.save is None]
    WRITTEN_SUFFIXES[:] = [suffix for one in written for suffix in one.suffixes]
    SUFFIXES[:] = [*WRITTEN_SUFFIXES, *(suffix for one in read for suffix in one.suffixes)]


for _known in (PNG, JPEG, WEBP, TIFF, AVIF, GIF, BMP, HEIC):
    add_format(_known)


def identify_format(head: bytes) -> ImageFormat | None:
    """Return the format of a file with first bytes ``head``, or None."""
    return next((one for one in FORMATS if one.begins(head)), None)


def is_media_container(head: bytes) -> bool:
    """Return whether a file is an ISO media file, of whatever brand."""
    return bool(_brands(head))


def format_of_suffix(suffix: str) -> ImageFormat | None:
    """Return the format that a suffix writes, or None; case and leading dot do not matter."""
    wanted = "." + suffix.lower().lstrip(".")
    return next((one for one in FORMATS if one.save and wanted in one.suffixes), None)


def unsupported_format_error(what: str) -> UsageError:
    """Build the error for a suffix or format name that Lowtide does not write."""
    return UsageError(
        f"{what} names no image format that Lowtide writes",
        hint=f"use one of {', '.join(WRITTEN_SUFFIXES)}",
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


def require_format_holds(
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
    names = [
        f.name for f in FORMATS if f.save and side <= f.max_side and (f.alpha or not info.alpha)
    ]
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
