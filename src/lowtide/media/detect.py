"""File type detection by the first bytes, never by the name."""

from __future__ import annotations

from lowtide.media.formats import AVIF, JPEG, PNG, TIFF, WEBP, ImageFormat

HEAD_BYTES = 512

_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_UNSUPPORTED: tuple[tuple[bytes, str], ...] = (
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"v/1\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance HDR image"),
    (b"SIMPLE  =", "a FITS image"),
    (b"MATLAB 5.0", "a MATLAB file"),
    (b"\x08\xf2\xa6\xb6", "a libvips image"),
    (b"\xb6\xa6\xf2\x08", "a libvips image"),
    (b"\0\0\1\0", "a Windows icon"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x7fELF", "a program"),
    (b"\x1aE\xdf\xa3", "a Matroska video"),
)


def identify(head: bytes) -> ImageFormat | None:
    """Return the supported format of a file with first bytes ``head``, or None."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if head.startswith(b"\xff\xd8\xff"):
        return JPEG
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return WEBP
    if head.startswith(_TIFF_MAGIC):
        return TIFF
    if _brands(head) & {b"avif", b"avis"}:
        return AVIF
    return None


def describe(head: bytes) -> str:
    """Describe a file of no supported format, with article: ``a PDF document``."""
    for magic, name in _UNSUPPORTED:
        if head.startswith(magic):
            return name
    brands = _brands(head)
    if brands & {b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"}:
        return "a HEIC image (HEVC), which this build of libvips cannot decode"
    if brands:
        return "a video or another ISO media file"
    return _describe_text(head)


def _brands(head: bytes) -> set[bytes]:
    if head[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(head[:4], "big"), len(head))
    return {head[8:12], *(head[at : at + 4] for at in range(16, end - 3, 4))}


def _describe_text(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith((b"<svg", b"<?xml")):
        return "an SVG or XML document" if b"<svg" in head else "an XML document"
    if start[:9].lower() in (b"<!doctype", b"<html") or start[:5].lower() == b"<html":
        return "an HTML page"
    if b"\0" not in head:
        # The end of the head may cut a multi-byte character.
        body = head if len(head) < HEAD_BYTES else head[:-4]
        if all(byte >= 32 or byte in b"\t\r\n\f" for byte in body):
            return "a text file"
    return "not an image in a format Lowtide knows"
