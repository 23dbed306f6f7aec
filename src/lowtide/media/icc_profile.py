"""ICC profiles made of what files say of their color in other ways: primaries and a curve.

Layout of profiles: ICC.1:2010 (version 4.3). Numbers of primaries and curves: ITU-T H.273.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

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
