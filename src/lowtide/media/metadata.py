"""Image metadata copied from input to output: ICC, EXIF, XMP, IPTC, resolution.

What a JPEG has beside its picture, such as gain maps, is not copied: notes say so, and XMP does not
announce any more what is gone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pyvips

from lowtide.media.stated_color import StatedColor

# libvips's ``keep`` flags of savers.
_KEEP_EXIF, _KEEP_XMP, _KEEP_IPTC, _KEEP_ICC = 1, 2, 4, 8
_XMP_ORIENTATION = re.compile(rb"(tiff:Orientation(?:\s*=\s*[\"']|>)\s*)[1-8]")
_ORIENTATION, _SHORT = 0x0112, 3
_ICC_CHANNELS = {b"GRAY": 1, b"RGB ": 3}
_NO_RESOLUTION = 1.0

_STARTS_ROWS, _ENDS, _APP0, _APP1, _APP2 = 0xDA, 0xD9, 0xE0, 0xE1, 0xE2
_MPF, _GAIN_MAP = b"MPF\0", b"urn:iso:std:iso:ts:21496:-1\0"
_NUMBER_OF_IMAGES = 0xB001
_HDR_XMP = b"http://ns.adobe.com/hdr-gain-map/1.0/"
_CONTAINERS = rb"http://ns\.google\.com/photos/1\.0/container/(?:item/)?"
_CAMERA = rb"http://ns\.google\.com/photos/1\.0/camera/"
_MOTION = re.compile(rb":(?:MotionPhoto|MicroVideo)\s*(?:=\s*[\"']1|>\s*1)|\"MotionPhoto\"")


@dataclass(frozen=True)
class ImageMetadata:
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

    def stripped(self) -> ImageMetadata:
        """Return a copy with only what colors depend on: the ICC profile, or the codes.

        EXIF, XMP, IPTC and the resolution are dropped; comments are never kept.
        """
        return ImageMetadata(icc=self.icc, codes=self.codes)

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
) -> ImageMetadata:
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
    return ImageMetadata(
        icc=icc,
        exif=_upright_exif(exif) if exif is not None else None,
        xmp=_XMP_ORIENTATION.sub(rb"\g<1>1", strip_part_marks(xmp)) if xmp is not None else None,
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


def attach_metadata(image: pyvips.Image, metadata: ImageMetadata) -> pyvips.Image:
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


def keep_flags(metadata: ImageMetadata) -> int:
    """Return the libvips ``keep`` flags for writing exactly this metadata."""
    flags = _KEEP_ICC
    if metadata.exif is not None:
        flags |= _KEEP_EXIF
    if metadata.xmp is not None:
        flags |= _KEEP_XMP
    if metadata.iptc is not None:
        flags |= _KEEP_IPTC
    return flags


@dataclass(frozen=True)
class JpegParts:
    """What the segments of a JPEG say: whether of its resolution, and of parts beside the picture.

    Attributes:
        has_resolution: Whether JFIF states one, and not the shape of pixels alone.
        notes: A note for each part that is not read.
    """

    has_resolution: bool = False
    notes: tuple[str, ...] = ()


def jpeg_parts(path: Path) -> JpegParts:
    """Return what the segments before the rows of a JPEG say."""
    has_resolution = gain_map = motion = False
    pictures = 1
    for marker, data in jpeg_segments(path):
        if marker == _APP0 and data.startswith(b"JFIF\0") and len(data) >= 12:
            has_resolution |= data[7] != 0
        if marker == _APP1:
            gain_map |= _HDR_XMP in data
            motion |= _MOTION.search(data) is not None
        if marker == _APP2:
            gain_map |= data.startswith(_GAIN_MAP)
            if data.startswith(_MPF):
                pictures = _picture_count(data[len(_MPF) :])
    notes = []
    if gain_map:
        notes.append("the gain map of HDR (Ultra HDR) is not kept: the picture is the SDR one")
    if (more := pictures - 1 - gain_map) > 0:
        notes.append(f"{more} more {'picture' if more == 1 else 'pictures'} of the file not read")
    if motion:
        notes.append("the video of a motion photo is not kept")
    return JpegParts(has_resolution, tuple(notes))


def strip_part_marks(xmp: bytes) -> bytes:
    """Return XMP that announces neither gain map, nor video, nor other parts of a container."""
    gone: list[bytes] = []
    for space, names in (
        (re.escape(_HDR_XMP), rb"\w+"),
        (_CONTAINERS, rb"\w+"),
        (_CAMERA, rb"(?:MotionPhoto|MicroVideo)\w*"),
    ):
        for found in re.finditer(rb"\sxmlns:(\w+)\s*=\s*([\"'])" + space + rb"\2", xmp):
            gone.append(re.escape(found[1]) + b":" + names)
            if names == rb"\w+":
                gone.append(rb"xmlns:" + re.escape(found[1]))
    for name in gone:
        xmp = re.sub(rb"<(" + name + rb")(?=[\s/>])[^>]*?(?:/>|>.*?</\1\s*>)", b"", xmp, flags=re.S)
    for name in gone:
        xmp = re.sub(rb"\s" + name + rb"\s*=\s*(?:\"[^\"]*\"|'[^']*')", b"", xmp)
    return xmp


def jpeg_segments(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of the segments before the rows; ends at damage."""
    with path.open("rb") as file:
        file.seek(2)
        while len(head := file.read(2)) == 2 and head[0] == 0xFF:
            while head[1] == 0xFF:  # fill bytes
                head = b"\xff" + file.read(1)
            if head[1] in (_STARTS_ROWS, _ENDS) or len(size := file.read(2)) < 2:
                return
            data = file.read(max(int.from_bytes(size) - 2, 0))
            yield head[1], data


def _picture_count(index: bytes) -> int:
    """Return the number of pictures that an MPF segment says, 1 where it is damaged."""
    order = "<" if index[:2] == b"II" else ">"
    try:
        (at,) = struct.unpack_from(order + "L", index, 4)
        (entries,) = struct.unpack_from(order + "H", index, at)
        for place in range(at + 2, at + 2 + 12 * entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHLL", index, place)
            if tag == _NUMBER_OF_IMAGES:
                return value if value < 1000 else 1
    except struct.error:
        pass
    return 1
