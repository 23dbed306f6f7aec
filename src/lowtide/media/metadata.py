"""Image metadata copied from input to output: ICC, EXIF, XMP, IPTC, resolution."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import cast

import pyvips

from lowtide.media.jpeg_parts import without_parts
from lowtide.media.stated_color import StatedColor

# libvips's ``keep`` flags of savers.
_KEEP_EXIF, _KEEP_XMP, _KEEP_IPTC, _KEEP_ICC = 1, 2, 4, 8
_XMP_ORIENTATION = re.compile(rb"(tiff:Orientation(?:\s*=\s*[\"']|>)\s*)[1-8]")
_ORIENTATION, _SHORT = 0x0112, 3
_ICC_CHANNELS = {b"GRAY": 1, b"RGB ": 3}
_NO_RESOLUTION = 1.0


@dataclass(frozen=True)
class Metadata:
    """Metadata of one image.

    ``icc``, ``exif``, ``xmp`` and ``iptc`` are the raw blocks of the file; where it describes its
    color otherwise, ``icc`` is made of that, or ``codes`` are H.273's numbers of primaries and
    curve, which no profile tells. ``xres`` and ``yres`` are in pixels per millimeter; ``unit``
    (``in`` or ``cm``) is the unit in the file. ``texts`` are
    those of a PNG by their keywords, as chunks.
    """

    icc: bytes | None = None
    exif: bytes | None = None
    xmp: bytes | None = None
    iptc: bytes | None = None
    xres: float = _NO_RESOLUTION
    yres: float = _NO_RESOLUTION
    unit: str = "in"
    codes: tuple[int, int] | None = None
    texts: dict[str, bytes] = field(default_factory=dict)

    def stripped(self) -> Metadata:
        """Return a copy with only what colors depend on: the ICC profile, or the codes.

        EXIF, XMP, IPTC and the resolution are dropped; comments are never kept.
        """
        return Metadata(icc=self.icc, codes=self.codes)

    @property
    def has_resolution(self) -> bool:
        """Whether the file has a resolution."""
        return self.xres != _NO_RESOLUTION

    def profile_for(self, color_channels: int) -> bytes | None:
        """Return the ICC profile if it is for this number of color channels, else None."""
        if self.icc is None or _ICC_CHANNELS.get(self.icc[16:20]) != color_channels:
            return None
        return self.icc


def read_metadata(
    image: pyvips.Image,
    color: StatedColor | None = None,
    *,
    has_resolution: bool = True,
    texts: dict[str, bytes] | None = None,
) -> Metadata:
    """Read the metadata of a decoded image, adjusted for upright pixels.

    ``color`` is what the file says of its color without a profile; that goes before one.
    Without ``has_resolution`` that of the image is libvips's own. ``texts`` are those of a PNG.

    For an image converted to sRGB it has the sRGB profile, which libvips attaches. The orientation
    in EXIF and XMP becomes 1. The EXIF thumbnail, which shows other pixels, is removed.
    """

    def blob(name: str) -> bytes | None:
        # Not by the list of field names: those of a damaged file may not be valid text.
        return bytes(cast(bytes, image.get(name))) if image.get_typeof(name) else None

    exif, xmp, icc = blob("exif-data"), blob("xmp-data"), blob("icc-profile-data")
    if color is not None:
        channels = image.bands - (image.bands in (2, 4))
        described = color.description
        icc = None if described is None else described.profile(channels, color.name)
    unit = str(image.get("resolution-unit")) if image.get_typeof("resolution-unit") else "in"
    return Metadata(
        icc=icc,
        exif=_upright_exif(exif) if exif is not None else None,
        xmp=_XMP_ORIENTATION.sub(rb"\g<1>1", without_parts(xmp)) if xmp is not None else None,
        iptc=blob("iptc-data"),
        xres=image.xres if has_resolution else _NO_RESOLUTION,
        yres=image.yres if has_resolution else _NO_RESOLUTION,
        unit="cm" if unit == "cm" else "in",
        texts=texts or {},
        codes=color.codes if color is not None and color.description is None else None,
    )


def _upright_exif(block: bytes) -> bytes:
    """Set the EXIF orientation to 1 and remove the second directory, the thumbnail."""
    data = bytearray(block)
    start = 6 if data.startswith(b"Exif\0\0") else 0
    order = "<" if data[start : start + 2] == b"II" else ">"
    try:
        at = start + struct.unpack_from(order + "L", data, start + 4)[0]
        (entries,) = struct.unpack_from(order + "H", data, at)
        for place in range(at + 2, at + 2 + 12 * entries, 12):
            if struct.unpack_from(order + "H", data, place)[0] == _ORIENTATION:
                struct.pack_into(order + "HL2H", data, place + 2, _SHORT, 1, 1, 0)
        struct.pack_into(order + "L", data, at + 2 + 12 * entries, 0)
    except struct.error:
        # The directory is truncated, and other readers stop there too.
        return bytes(data)
    return bytes(data)


def attach(image: pyvips.Image, metadata: Metadata) -> pyvips.Image:
    """Return a copy of ``image``, which has no metadata, with ``metadata``.

    While writing the EXIF block libvips sets the dimensions in it to those of the image.
    """
    plain = image.copy(xres=metadata.xres, yres=metadata.yres)
    plain.set_type(pyvips.GValue.gstr_type, "resolution-unit", metadata.unit)
    blocks = {
        "icc-profile-data": metadata.profile_for(image.bands - (image.bands in (2, 4))),
        "exif-data": metadata.exif,
        "xmp-data": metadata.xmp,
        "iptc-data": metadata.iptc,
    }
    for name, block in blocks.items():
        if block is not None:
            # The type annotation of pyvips lacks bytes.
            plain.set_type(pyvips.GValue.blob_type, name, cast(str, block))
    return plain


def keep_flags(metadata: Metadata) -> int:
    """Return the libvips ``keep`` flags for writing exactly this metadata."""
    flags = _KEEP_ICC
    if metadata.exif is not None:
        flags |= _KEEP_EXIF
    if metadata.xmp is not None:
        flags |= _KEEP_XMP
    if metadata.iptc is not None:
        flags |= _KEEP_IPTC
    return flags
