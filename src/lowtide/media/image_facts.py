"""Image header inspection: shape, format, orientation, and memory of decoding."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import pyvips

from lowtide.core.errors import ImageError
from lowtide.core.input_file import require_input
from lowtide.media import codec_memory
from lowtide.media._libvips import (
    FILE_ERRORS,
    configure_libvips,
    is_harmless_jpeg_error,
    libvips_error_text,
)
from lowtide.media.detect import HEAD_BYTES, camera_raw, describe_file_kind
from lowtide.media.formats import AVIF, FORMATS, HEIC, JPEG, PNG, TIFF, ImageFormat, identify_format
from lowtide.media.image_info import ImageInfo
from lowtide.media.metadata import ImageMetadata, JpegParts, jpeg_parts, read_metadata
from lowtide.media.pixels import image_info_of, select_channels, to_gray_or_rgb
from lowtide.media.stated_color import StatedColor, heif_color, png_chunks, png_color, png_texts
from lowtide.media.tiff_header import (
    has_exif,
    has_resolution_tag,
    is_lab_of_bytes,
    largest_strip_bytes,
)
from lowtide.media.whole_file import COPIES, open_whole, spool_bytes, spool_memory, upright_info

MAX_PIXELS = 1_000_000_000


@dataclass(frozen=True)
class ImageFacts:
    """Header of an image file, and the memory and disk space that decoding needs.

    ``info`` is the upright image; ``orientation`` is the EXIF value 1 to 8 that is applied to get
    it. ``resident_bytes`` is an upper bound on the host memory of decoding, without the rows that
    are returned; ``typical_bytes`` is the typical value, ``reason`` says why. ``scratch_bytes`` is
    the disk space needed to rotate the image. ``notes`` are messages about conversions of what is
    stored. ``color`` is what the file says of its color without a profile, and
    ``spans_type`` whether integer samples are known to span their type.
    """

    info: ImageInfo
    format: str
    orientation: int
    resident_bytes: int
    typical_bytes: int
    scratch_bytes: int
    reason: str
    notes: tuple[str, ...]
    color: StatedColor | None = field(default=None, kw_only=True)
    spans_type: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class OpenDecoder:
    """Opened decoder, positioned at the top of a file.

    ``stored_info`` is the image before its orientation is applied, ``metadata`` what the file says
    beside its pixels. This decoder stops at any flaw;
    ``reopen_tolerant`` opens one that continues over harmless ones, None if there is no such
    choice.
    """

    image: pyvips.Image
    stored_info: ImageInfo
    facts: ImageFacts
    metadata: ImageMetadata
    reopen_tolerant: Callable[[], OpenDecoder] | None = None


def inspect_image(path: Path | str, *, max_pixels: int = MAX_PIXELS) -> ImageFacts:
    """Read shape, format and decoding memory of an image file from its header.

    Raises `ImageError` for a file that is missing, unreadable, not an image in a supported
    format, damaged in its header, or larger than ``max_pixels``.
    """
    return open_decoder(Path(path), max_pixels, decode=False).facts


def open_decoder(
    path: Path, max_pixels: int, *, tolerant: bool = False, decode: bool = True
) -> OpenDecoder:
    """Open a file for sequential decoding; raises as `inspect_image`.

    Formats that are decoded at once are not where not to ``decode``: their pixels are black.

    A JPEG stops at any warning, and is opened again with ``tolerant`` if the warning is
    harmless. This is needed because truncated data is only a warning to libvips, which fills the
    rest with gray.
    """
    configure_libvips()
    kind = _identify(path)
    strict = kind is JPEG and not tolerant
    beside: list[str] = []
    try:
        by_vips = bool(kind.loader) and not (kind is TIFF and is_lab_of_bytes(path))
        if by_vips:
            loader = getattr(pyvips.Image, kind.loader)
            # "error" covers truncated files of the other formats.
            fail_on = "warning" if strict else "error"
            header = loader(str(path), access="sequential", fail_on=fail_on)
        else:
            header, beside = open_whole(path, kind, decode=False)
        _check_size(path, header, max_pixels)
        if decode and not by_vips:
            header, beside = open_whole(path, kind, decode=True)
        orientation = _orientation(header)
        chunks = png_chunks(path) if kind is PNG else {}
        texts = png_texts(path) if kind is PNG else {}
        parts = jpeg_parts(path) if kind is JPEG else JpegParts()
        color = heif_color(path) if kind in (AVIF, HEIC) else png_color(chunks)
        own, notes = select_channels(header, path) if kind is TIFF and by_vips else (header, [])
        image, more = to_gray_or_rgb(own, path)
        stored = image_info_of(image)
    except UnicodeEncodeError as error:
        raise ImageError(
            f"{str(path)!r}: libvips cannot open a name that is not valid text",
            hint="rename the file",
        ) from error
    except FILE_ERRORS as error:
        if strict and is_harmless_jpeg_error(error):
            return open_decoder(path, max_pixels, tolerant=True)
        raise ImageError(
            f"{path}: damaged or unsupported {kind.name} file ({libvips_error_text(error)})"
        ) from error
    cost, why = _decoding_cost(path, kind, header, stored)
    scratch = spool_bytes(stored, orientation)
    if scratch:
        cost += codec_memory.whole_image_bytes(spool_memory(stored, orientation))
        why += ", and a block of rows to rotate the image by its EXIF orientation"
    facts = ImageFacts(
        info=upright_info(stored, orientation),
        format=PNG.name if kind.save is None else kind.name,
        orientation=orientation,
        resident_bytes=cost.upper,
        typical_bytes=cost.typical,
        scratch_bytes=scratch,
        reason=why,
        notes=(
            *_header_notes(header, chunks),
            *parts.notes,
            *beside,
            *notes,
            *more,
            *_color_notes(color),
            *(["EXIF of a TIFF is not read"] if kind is TIFF and has_exif(path) else []),
        ),
        color=color if color is not None and color.matters else None,
        spans_type=kind in (AVIF, HEIC),
    )
    reopen_tolerant = partial(open_decoder, path, max_pixels, tolerant=True) if strict else None
    has_resolution = (
        parts.has_resolution
        or chunks.get(b"pHYs", b"")[8:] == b"\1"
        or (kind is TIFF and has_resolution_tag(path))
        or header.get_typeof("exif-ifd0-XResolution") != 0
    )
    metadata = read_metadata(image, facts.color, has_resolution=has_resolution, texts=texts)
    return OpenDecoder(image, stored, facts, metadata, reopen_tolerant)


def _identify(path: Path) -> ImageFormat:
    require_input(path, ImageError)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except PermissionError as error:
        raise ImageError(f"{path}: no permission to read this file") from error
    except (OSError, ValueError) as error:
        raise ImageError(f"{path}: cannot be read ({error})") from error
    if not head:
        raise ImageError(f"{path}: the file is empty (0 bytes)")
    if raw := camera_raw(path, head):
        raise ImageError(
            f"{path}: this is a camera RAW file ({raw}), and only its preview could be read",
            hint="develop it first, for example: darktable-cli"
            f" {shlex.quote(str(path))} {shlex.quote(path.stem)}_developed.tif",
        )
    kind = identify_format(head)
    if kind is None:
        names = ", ".join(entry.name for entry in FORMATS)
        raise ImageError(
            f"{path}: this is {describe_file_kind(head)}", hint=f"convert it to one of {names}"
        )
    return kind


def _check_size(path: Path, image: pyvips.Image, max_pixels: int) -> None:
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise ImageError(
            f"{path}: {image.width:,} x {image.height:,} is {pixels:,} pixels and the limit is "
            f"{max_pixels:,}",
            hint=f"--max-pixels {pixels} if this size is intended",
        )


def _field(image: pyvips.Image, name: str, default: object) -> object:
    return image.get(name) if image.get_typeof(name) else default


def _orientation(image: pyvips.Image) -> int:
    # The AVIF loader rotates by the container's own flag and removes this field.
    value = cast(int, _field(image, "orientation", 1))
    return value if 1 <= value <= 8 else 1


def _color_notes(color: StatedColor | None) -> list[str]:
    if color is None or not color.matters:
        return []
    kept = "the chunk cICP" if color.description is None else "an ICC profile"
    return [f"color is {color.name}, kept as {kept}"]


def _header_notes(image: pyvips.Image, chunks: dict[bytes, bytes]) -> list[str]:
    notes: list[str] = []
    if b"acTL" in chunks:
        notes.append("the first picture of an animation is read")
    pages = cast(int, _field(image, "n-pages", 1))
    if pages > 1:
        notes.append(f"page 1 of {pages} read")
    bits = cast(int, _field(image, "bits-per-sample", 8))
    if _field(image, "palette", 0):
        notes.append("palette expanded")
    elif bits < 8:
        notes.append(f"{bits}-bit samples expanded to 8 bits")
    return notes


def _decoding_cost(
    path: Path, kind: ImageFormat, header: pyvips.Image, info: ImageInfo
) -> tuple[codec_memory.CodecBytes, str]:
    rows = codec_memory.row_window_bytes(info)
    if kind is JPEG:
        # libvips maps the file into memory while it decodes.
        rows += codec_memory.mapped_file_bytes(path.stat().st_size)
    if kind is JPEG and _field(header, "jpeg-multiscan", 0):
        subsampling = str(_field(header, "jpeg-chroma-subsample", ""))
        held = codec_memory.jpeg_coefficients(info, header.bands, subsampling)
        return rows + held, "a progressive JPEG is decoded from coefficients of the whole image"
    if kind is PNG and _field(header, "interlaced", 0):
        held = codec_memory.whole_image_bytes(info.height * info.row_bytes)
        return rows + held, "an interlaced PNG is decoded as a whole"
    if kind.save is None or (kind is TIFF and is_lab_of_bytes(path)):
        held = codec_memory.whole_image_bytes(COPIES * info.height * info.row_bytes)
        return rows + held, f"a {kind.name} is decoded as a whole"
    if kind.decoder_bytes is not None:
        held = kind.decoder_bytes(info, path.stat().st_size)
        return rows + held, f"{kind.with_article} is decoded as a whole"
    if kind is TIFF:
        tile_height = cast(int, _field(header, "tile-height", 0))
        held = codec_memory.whole_image_bytes(largest_strip_bytes(path))
        # Dropped channels are decoded too.
        decoded = replace(info, channels=max(info.channels, header.bands))
        rows = codec_memory.strip_window_bytes(decoded, tile_height)
        return rows + held, "a TIFF is decoded by strips or rows of tiles"
    return rows, f"this {kind.name} is decoded by rows"
