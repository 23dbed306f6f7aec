"""File types by the first bytes, camera RAW among them, and why files are skipped.

Of camera RAW files decoders would read only a preview.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.input_file import exists, is_file, is_folder
from lowtide.media.formats import SUFFIXES, identify_format, is_media_container
from lowtide.media.tiff_header import TiffDirectory, tiff_directories

HEAD_BYTES = 512

_UNSUPPORTED: tuple[tuple[bytes, str], ...] = (
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

RAW_SUFFIXES = tuple(
    (
        ".3fr .ari .arw .bay .cap .cr2 .cr3 .crw .dcr .dcs .dng .drf .eip .erf .fff .gpr .iiq .k25"
        " .kdc .mdc .mef .mos .mrw .nef .nrw .orf .pef .ptx .r3d .raf .raw .rw2 .rwl .rwz .sr2 .srf"
        " .srw .x3f"
    ).split()
)
# First bytes of some makers' files.
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (rb"II\*\0....CR\x02\0", "Canon CR2"),
    (rb"....ftypcrx ", "Canon CR3"),
    (rb"II....HEAPCCDR", "Canon CRW"),
    (rb"IIR[OS]|MMOR", "Olympus ORF"),
    (rb"IIU\0", "Panasonic RW2"),
    (rb"FUJIFILMCCD-RAW", "Fujifilm RAF"),
    (rb"\0MRM", "Minolta MRW"),
    (rb"FOVb", "Sigma X3F"),
    (rb"(II\*\0|MM\0\*)....(IIII|MMMM)", "Phase One IIQ"),
)
_TIFF_ORDERS = (b"II", b"MM")
_SUBFILE, _COMPRESSION, _PHOTOMETRIC, _MAKE, _SUBDIRECTORIES = 254, 259, 262, 271, 330
_DNG_VERSION = 50_706
_REDUCED = 1
# Photometric interpretations: color filter array, and linear raw.
_SENSOR = (32_803, 34_892)
# TIFF compressions of Sony, Nikon, Samsung, Kodak and Pentax.
_RAW_COMPRESSIONS = (32_767, 32_769, 32_770, 34_713, 65_000, 65_535)

_NAMED = 3  # files listed per reason


def describe_file_kind(head: bytes) -> str:
    """Describe a file of no supported format, with article: ``a PDF document``."""
    for magic, name in _UNSUPPORTED:
        if head.startswith(magic):
            return name
    if is_media_container(head):
        return "a video or another ISO media file"
    return _describe_text(head)


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


def is_raw_name(path: Path) -> bool:
    """Return whether a name has a suffix of camera RAW files."""
    return path.suffix.lower() in RAW_SUFFIXES


def camera_raw(path: Path, head: bytes) -> str | None:
    """Return the kind of camera RAW of a file with first bytes ``head``, or None.

    It is detected by signatures and by the tags of all directories of a TIFF. A TIFF whose tags
    do not decide is RAW if its suffix is.
    """
    for magic, name in _SIGNATURES:
        if re.match(magic, head, re.DOTALL):
            return name
    if not head.startswith(_TIFF_ORDERS):
        return None
    with path.open("rb") as file:
        return _raw_tiff(path, list(tiff_directories(file)))


def _raw_tiff(path: Path, found: list[TiffDirectory]) -> str | None:
    if any(_DNG_VERSION in one for one in found):
        return "DNG"
    if is_raw_name(path):
        return path.suffix[1:].upper()
    if any(_is_sensor(one) for one in found) or _begins_with_a_preview(found):
        return "in a TIFF"
    return None


def _is_sensor(directory: TiffDirectory) -> bool:
    values = directory.value(_PHOTOMETRIC, 0), directory.value(_COMPRESSION, 0)
    return values[0] in _SENSOR or values[1] in _RAW_COMPRESSIONS


def _begins_with_a_preview(found: list[TiffDirectory]) -> bool:
    """Return whether the first directory is a camera's reduced preview.

    In a pyramidal TIFF the reduced images come after the first.
    """
    return any(
        bool(first.value(_SUBFILE, 0) & _REDUCED) and _MAKE in first and _SUBDIRECTORIES in first
        for first in found[:1]
    )


@dataclass(frozen=True)
class SkippedFile:
    """Skipped file or folder among the inputs, and the reason."""

    path: Path
    reason: str


def skip_reason(path: Path) -> str:
    """Describe why a path that is not of a job's kind is skipped, by its name and content."""
    if is_folder(path):
        return "a folder"
    if not is_file(path):
        return "not a regular file" if exists(path) else "a broken link"
    if is_raw_name(path):
        return "camera RAW, needs developing first"
    if path.suffix.lower() in SUFFIXES:
        return "an image"
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not head:
        return "empty"
    kind = identify_format(head)
    return (
        describe_file_kind(head)
        if kind is None
        else f"{kind.name} by its content, but not by its name"
    )


def skipped_summary(skipped: Sequence[SkippedFile]) -> list[str]:
    """Return a line per reason with a few names: ``hidden: .git, .cache and 3 more``."""
    names: dict[str, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reason, []).append(str(one.path))
    return [
        f"{reason}: {', '.join(paths[:_NAMED])}"
        + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
        for reason, paths in sorted(names.items(), key=lambda item: -len(item[1]))
    ]
