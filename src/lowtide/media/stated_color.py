"""What PNG and AVIF files say of their color without a profile: cICP, gAMA, cHRM, and nclx.

Where profiles are made of it, their layout is that of ICC.1:2010 (version 4.3), and numbers of
primaries and curves are those of ITU-T H.273.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

# Numbers of ITU-T H.273 for curves of more than white, which no profile tells.
HDR = {16: "PQ", 18: "HLG"}
_NAMES = {1: "BT.709", 9: "BT.2020", 11: "DCI-P3", 12: "Display P3"}
_TEXTS = b"tEXt", b"zTXt", b"iTXt"
_LONGEST_CHUNK, _LONGEST_META = 4096, 1 << 24

# Places (x, y) of red, green, blue and white.
Chromaticities = tuple[
    tuple[float, float], tuple[float, float], tuple[float, float], tuple[float, float]
]
Curve = tuple[float, ...]  # parameters of ICC's parametric curves: g, or g, a, b, c, d
_D65, _C, _DCI = (0.3127, 0.3290), (0.310, 0.316), (0.314, 0.351)
SRGB_PLACES: Chromaticities = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060), _D65)
SRGB_CURVE: Curve = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_VIDEO_CURVE: Curve = (1 / 0.45, 1 / 1.0993, 0.0993 / 1.0993, 1 / 4.5, 0.0812)
_PRIMARIES: dict[int, Chromaticities] = {
    1: SRGB_PLACES,
    4: ((0.67, 0.33), (0.21, 0.71), (0.14, 0.08), _C),
    5: ((0.64, 0.33), (0.29, 0.60), (0.15, 0.06), _D65),
    6: ((0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    7: ((0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    8: ((0.681, 0.319), (0.243, 0.692), (0.145, 0.049), _C),
    9: ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    11: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _DCI),
    12: ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
    22: ((0.630, 0.340), (0.295, 0.605), (0.155, 0.077), _D65),
}
_CURVES: dict[int, Curve] = {
    **dict.fromkeys((1, 6, 11, 12, 14, 15), _VIDEO_CURVE),
    4: (2.2,),
    5: (2.8,),
    7: (1 / 0.45, 1 / 1.1115, 0.1115 / 1.1115, 1 / 4.0, 0.0913),
    8: (1.0,),
    13: SRGB_CURVE,
}
_NOT_SAID, _SRGB = 2, (1, 13)
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
_D50 = np.array([0.9642, 1.0, 0.8249])


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


@dataclass(frozen=True)
class ColorDescription:
    """Color by primaries and a curve, as a profile tells it."""

    places: Chromaticities
    curve: Curve

    @classmethod
    def of_codes(cls, primaries: int, transfer: int) -> ColorDescription | None:
        """Return that of H.273's numbers, None where there is no profile of them.

        What is not said is sRGB's.
        """
        places = _PRIMARIES.get(_SRGB[0] if primaries == _NOT_SAID else primaries)
        curve = _CURVES.get(_SRGB[1] if transfer == _NOT_SAID else transfer)
        return None if places is None or curve is None else cls(places, curve)

    @property
    def is_srgb(self) -> bool:
        """Whether it is what files are without any description."""
        near = np.allclose(self.places, SRGB_PLACES, atol=2e-3)
        return near and (self.curve == SRGB_CURVE or abs(self.curve[0] - 2.2) < 0.01)

    def profile(self, color_channels: int, name: str) -> bytes:
        """Return an ICC profile of gray or RGB with this description, called ``name``."""
        tags = {b"desc": _text(name), b"cprt": _text("No copyright"), b"wtpt": _place(_D50)}
        curve = _curve(self.curve)
        if color_channels == 1:
            return _assembled(b"GRAY", {**tags, b"kTRC": curve})
        columns, adaptation = self._to_d50()
        tags |= {b"chad": b"sf32\0\0\0\0" + _fixed(adaptation)}
        for letter, column in zip(b"rgb", columns.T, strict=True):
            tags |= {bytes([letter]) + b"XYZ": _place(column), bytes([letter]) + b"TRC": curve}
        return _assembled(b"RGB ", tags)

    def _to_d50(self) -> tuple[np.ndarray, np.ndarray]:
        """Return XYZ of the primaries (3, 3) as D50 has them, and the adaptation to it."""
        *colors, white = ((x / y, 1.0, (1 - x - y) / y) for x, y in self.places)
        matrix, light = np.array(colors).T, np.array(white)
        matrix = matrix * np.linalg.solve(matrix, light)
        gains = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ light))
        adaptation = np.linalg.inv(_BRADFORD) @ gains @ _BRADFORD
        return adaptation @ matrix, adaptation


def rgb_profile_of_gray(profile: bytes) -> bytes | None:
    """Return an RGB profile in which equal values are the grays of a gray profile.

    None where its grays are not told by one curve.
    """
    (count,) = struct.unpack_from(">L", profile, 128)
    for at in range(132, min(132 + 12 * count, len(profile) - 11), 12):
        name, start, size = struct.unpack_from(">4sLL", profile, at)
        if name == b"kTRC" and profile[20:24] == b"XYZ ":
            curve = profile[start : start + size]
            made = ColorDescription(SRGB_PLACES, SRGB_CURVE).profile(3, "gray")
            return _with_curves(made, curve)
    return None


def _with_curves(profile: bytes, curve: bytes) -> bytes:
    (count,) = struct.unpack_from(">L", profile, 128)
    found = [struct.unpack_from(">4sLL", profile, 132 + 12 * one) for one in range(count)]
    tags = {
        name: curve if name.endswith(b"TRC") else profile[start : start + size]
        for name, start, size in found
    }
    return _assembled(profile[16:20], tags)


def _assembled(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    table, data, places = b"", b"", dict[bytes, int]()
    start = 128 + 4 + 12 * len(tags)
    for name, block in tags.items():
        if block not in places:
            places[block] = start + len(data)
            data += block + b"\0" * (-len(block) % 4)
        table += struct.pack(">4sLL", name, places[block], len(block))
    head = struct.pack(
        ">L4sL4s4s4s6H4sL4s4sQL",
        start + len(data),
        b"\0" * 4,
        0x0430_0000,
        b"mntr",
        space,
        b"XYZ ",
        *(2026, 1, 1, 0, 0, 0),
        b"acsp",
        0,
        b"\0" * 4,
        b"\0" * 4,
        0,
        0,
    ).ljust(68, b"\0")
    head += _fixed(_D50)
    return head.ljust(128, b"\0") + struct.pack(">L", len(tags)) + table + data


def _text(words: str) -> bytes:
    data = words.encode("utf-16-be")
    return struct.pack(">4sLLL2s2sLL", b"mluc", 0, 1, 12, b"en", b"US", len(data), 28) + data


def _place(xyz: np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(xyz)


def _curve(parameters: Curve) -> bytes:
    kind = 0 if len(parameters) == 1 else 3
    return struct.pack(">4sLHH", b"para", 0, kind, 0) + _fixed(np.array(parameters))


def _fixed(values: np.ndarray) -> bytes:
    return np.rint(np.asarray(values) * 65_536).astype(">i4").tobytes()
