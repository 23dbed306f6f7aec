"""Detection of camera RAW files, of which decoders would read only a preview."""

from __future__ import annotations

import re
from pathlib import Path

from lowtide.media.tiff_header import Directory, directories

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
        return _raw_tiff(path, list(directories(file)))


def _raw_tiff(path: Path, found: list[Directory]) -> str | None:
    if any(_DNG_VERSION in one for one in found):
        return "DNG"
    if is_raw_name(path):
        return path.suffix[1:].upper()
    if any(_is_sensor(one) for one in found) or _begins_with_a_preview(found):
        return "in a TIFF"
    return None


def _is_sensor(directory: Directory) -> bool:
    values = directory.value(_PHOTOMETRIC, 0), directory.value(_COMPRESSION, 0)
    return values[0] in _SENSOR or values[1] in _RAW_COMPRESSIONS


def _begins_with_a_preview(found: list[Directory]) -> bool:
    """Return whether the first directory is a camera's reduced preview.

    In a pyramidal TIFF the reduced images come after the first.
    """
    return any(
        bool(first.value(_SUBFILE, 0) & _REDUCED) and _MAKE in first and _SUBDIRECTORIES in first
        for first in found[:1]
    )
