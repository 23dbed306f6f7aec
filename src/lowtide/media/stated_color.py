"""What PNG and AVIF files say of their color without a profile: cICP, gAMA, cHRM, and nclx."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lowtide.media.icc_profile import SRGB_PLACES, ColorDescription

# Numbers of ITU-T H.273 for curves of more than white, which no profile tells.
HDR = {16: "PQ", 18: "HLG"}
_NAMES = {1: "BT.709", 9: "BT.2020", 11: "DCI-P3", 12: "Display P3"}
_TEXTS = b"tEXt", b"zTXt", b"iTXt"
_LONGEST_CHUNK, _LONGEST_META = 4096, 1 << 24


@dataclass(frozen=True)
class StatedColor:
    """Color that a file describes by itself.

    Attributes:
        name: What it says, for messages.
        description: Primaries and curve, None of those that a profile cannot tell.
        hdr: PQ or HLG, else None.
        codes: H.273's numbers of primaries and curve, None without.
    """

    name: str
    description: ColorDescription | None
    hdr: str | None = None
    codes: tuple[int, int] | None = None

    @property
    def matters(self) -> bool:
        """Whether color would change without it."""
        return self.description is None or not self.description.is_srgb

    @classmethod
    def of_codes(cls, source: str, primaries: int, transfer: int) -> StatedColor:
        """Return the color of H.273's numbers."""
        shown = _NAMES.get(primaries, f"primaries {primaries}")
        shown += f" with {HDR[transfer]}" if transfer in HDR else ""
        described = ColorDescription.of_codes(primaries, transfer)
        name = f"{shown} ({source} {primaries}, {transfer})"
        return cls(name, described, HDR.get(transfer), (primaries, transfer))


def png_color(chunks: dict[bytes, bytes]) -> StatedColor | None:
    """Return the color that the chunks of a PNG describe, as far as they go before a profile."""
    if len(code := chunks.get(b"cICP", b"")) == 4:
        return StatedColor.of_codes("cICP", code[0], code[1])
    if b"iCCP" in chunks or b"sRGB" in chunks or len(chunks.get(b"gAMA", b"")) != 4:
        return None
    (inverse,) = struct.unpack(">L", chunks[b"gAMA"])
    if not 1_000 <= inverse <= 1_000_000:
        return None
    places, gamma = SRGB_PLACES, 100_000 / inverse
    if len(chunks.get(b"cHRM", b"")) == 32:
        white, *colors = struct.iter_unpack(">LL", chunks[b"cHRM"])
        red, green, blue, white = ((x / 1e5, y / 1e5) for x, y in (*colors, white))
        if min(y for _, y in (red, green, blue, white)) > 0:
            places = (red, green, blue, white)
    return StatedColor(f"gamma {gamma:.4g} (gAMA)", ColorDescription(places, (gamma,)))


def png_chunks(path: Path) -> dict[bytes, bytes]:
    """Return the short chunks of a PNG that come before its pixels, by name; the first of each."""
    found: dict[bytes, bytes] = {}
    for name, data in _png_chunks(path, _LONGEST_CHUNK):
        found.setdefault(name, data)
    return found


def png_texts(path: Path) -> dict[str, bytes]:
    """Return the texts of a PNG before its pixels as whole chunks, by their keywords.

    Without those that hold XMP, EXIF and other profiles, and what is longer than 16 MiB.
    """
    found: dict[str, bytes] = {}
    for name, data in _png_chunks(path, _LONGEST_META):
        key = data.partition(b"\0")[0].decode("latin-1")
        if name in _TEXTS and data and not key.startswith(("XML:com.adobe", "Raw profile type")):
            body = name + data
            chunk = struct.pack(">L", len(data)) + body + struct.pack(">L", zlib.crc32(body))
            found[key] = found.get(key, b"") + chunk
    return found


def _png_chunks(path: Path, longest: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of the chunks before the pixels; longer ones are empty."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            size, name = struct.unpack(">L4s", head)
            if name == b"IDAT" or size > 1 << 31:
                return
            data = file.read(size) if size <= longest else b""
            file.seek(size - len(data) + 4, 1)
            yield name, data


def heif_color(path: Path) -> StatedColor | None:
    """Return the color of an AVIF's or HEIC's nclx box; None without, or beside a profile."""
    with path.open("rb") as file:
        meta = _meta(file)
    boxes = dict(_boxes(meta[4:]))  # a version and flags come first
    properties = [one for _, one in _boxes(dict(_boxes(boxes.get(b"iprp", b""))).get(b"ipco", b""))]
    kinds = [name for name, _ in _boxes(dict(_boxes(boxes.get(b"iprp", b""))).get(b"ipco", b""))]
    own = _associated(boxes)
    colors = [
        data
        for place, (kind, data) in enumerate(zip(kinds, properties, strict=True), start=1)
        if kind == b"colr" and (own is None or place in own)
    ]
    if any(data[:4] in (b"prof", b"rICC") for data in colors):
        return None
    for data in colors:
        if data[:4] == b"nclx" and len(data) >= 10:
            return StatedColor.of_codes("nclx", *struct.unpack_from(">HH", data, 4))
    return None


def _meta(file: BinaryIO) -> bytes:
    """Return the content of the first box called meta, nothing if there is none."""
    while len(head := file.read(8)) == 8:
        size, name = struct.unpack(">L4s", head)
        used = 8
        if size == 1:
            size, used = int.from_bytes(file.read(8)), 16
        if name == b"meta":
            return file.read(min(size - used, _LONGEST_META) if size else _LONGEST_META)
        if size < used:
            break
        file.seek(size - used, 1)
    return b""


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of the boxes in ``data``; ends at damage."""
    at = 0
    while at + 8 <= len(data):
        size, name = struct.unpack_from(">L4s", data, at)
        used = 8
        if size == 1 and at + 16 <= len(data):
            size, used = int.from_bytes(data[at + 8 : at + 16]), 16
        end = len(data) if size == 0 else at + size
        if end < at + used:
            return
        yield name, data[at + used : end]
        at = end


def _associated(boxes: dict[bytes, bytes]) -> set[int] | None:
    """Return the places of the primary picture's properties; None where that is not told."""
    primary, table = boxes.get(b"pitm", b""), dict(_boxes(boxes.get(b"iprp", b""))).get(b"ipma")
    try:
        wide = primary[0] > 0
        (item,) = struct.unpack_from(">L" if wide else ">H", primary, 4)
        assert table is not None
        version, long_places = table[0], table[3] & 1
        (count,) = struct.unpack_from(">L", table, 4)
        at = 8
        for _ in range(count):
            (one,) = struct.unpack_from(">H" if version == 0 else ">L", table, at)
            at += 2 if version == 0 else 4
            places = table[at]
            size = places * (2 if long_places else 1)
            found = struct.unpack_from(f">{places}{'H' if long_places else 'B'}", table, at + 1)
            if one == item:
                return {place & (0x7FFF if long_places else 0x7F) for place in found}
            at += 1 + size
    except (struct.error, IndexError, AssertionError):
        pass
    return None
