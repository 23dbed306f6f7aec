"""Camera RAW files that tests write: uncompressed DNG with any filter array."""

import struct
from pathlib import Path

import numpy as np

BAYER = {
    "RGGB": [[0, 1], [1, 2]],
    "GRBG": [[1, 0], [2, 1]],
    "GBRG": [[1, 2], [0, 1]],
    "BGGR": [[2, 1], [1, 0]],
}
XTRANS = [
    [1, 2, 1, 1, 0, 1],
    [0, 1, 0, 2, 1, 2],
    [1, 2, 1, 1, 0, 1],
    [1, 0, 1, 1, 2, 1],
    [2, 1, 2, 0, 1, 0],
    [1, 0, 1, 1, 2, 1],
]
_BYTE, _ASCII, _SHORT, _LONG, _RATIONAL, _SIGNED = 1, 2, 3, 4, 5, 10
_FORMATS = {_BYTE: "B", _SHORT: "H", _LONG: "L"}
_PHOTOMETRIC_CFA, _PHOTOMETRIC_LINEAR = 32_803, 34_892


def write_dng(
    path: Path,
    values,
    pattern: list[list[int]] | None = BAYER["RGGB"],
    *,
    black=64,
    white=4095,
    iso=800,
    orientation=1,
    pixel=(1, 1),
    crop: tuple[int, int, int, int] | None = None,
) -> Path:
    """Write levels (H, W), or (H, W, 3) without a filter array, as an uncompressed DNG.

    ``pattern`` None is a sensor without colors. ``black`` is one level, or four by place of a 2 × 2
    filter; ``iso`` None leaves it out. ``pixel`` is what width and height are stretched by, and
    ``crop`` the camera's: left, top, width and height.
    """
    values = np.asarray(values)
    height, width, *colors = values.shape
    count = colors[0] if colors else 1
    data = values.astype("<u2").tobytes()
    blacks = np.atleast_1d(black).tolist()
    entries = [
        (256, _LONG, [width]),
        (257, _LONG, [height]),
        (258, _SHORT, [16] * count),
        (259, _SHORT, [1]),
        (262, _SHORT, [_PHOTOMETRIC_LINEAR if colors or pattern is None else _PHOTOMETRIC_CFA]),
        (271, _ASCII, b"Lowtide\0"),
        (272, _ASCII, b"Test\0"),
        (274, _SHORT, [orientation]),
        (277, _SHORT, [count]),
        (278, _LONG, [height]),
        (279, _LONG, [len(data)]),
        (284, _SHORT, [1]),
        (50706, _BYTE, [1, 4, 0, 0]),
        (50708, _ASCII, b"Lowtide Test\0"),
        (50713, _SHORT, [2, 2] if len(blacks) == 4 else [1, 1]),
        (50714, _LONG, blacks),
        (50717, _LONG, [white] * count),
        (50718, _RATIONAL, [(side, 1) for side in pixel]),
    ]
    if crop is not None:
        entries += [(50719, _LONG, list(crop[:2])), (50720, _LONG, list(crop[2:]))]
    if colors or pattern is not None:
        entries += [
            (50721, _SIGNED, [(int(one % 4 == 0), 1) for one in range(9)]),
            (50728, _RATIONAL, [(1, 2), (1, 1), (2, 3)]),
            (50778, _SHORT, [21]),
        ]
    if not colors and pattern is not None:
        places = np.asarray(pattern)
        entries += [
            (33421, _SHORT, list(places.shape)),
            (33422, _BYTE, places.ravel().tolist()),
            (50710, _BYTE, list(range(places.max() + 1))),
            (50711, _SHORT, [1]),
        ]
    exif = _directory([(34855, _SHORT, [iso])] if iso else [], 0)
    at = 8 + len(_directory([*entries, (273, _LONG, [0]), (34665, _LONG, [0])], 8))
    pointers = [(273, _LONG, [at + len(exif)]), (34665, _LONG, [at])]
    head = b"II*\0" + struct.pack("<L", 8) + _directory([*entries, *pointers], 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + exif + data)
    return path


def _directory(entries, at):
    table, more = struct.pack("<H", len(entries)), b""
    start = at + 2 + 12 * len(entries) + 4
    for tag, kind, values in sorted(entries):
        if kind in _FORMATS:
            data = struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)
        elif kind == _ASCII:
            data = values
        else:
            data = b"".join(struct.pack("<ll" if kind == _SIGNED else "<LL", *v) for v in values)
        table += struct.pack("<HHL", tag, kind, len(values))
        if len(data) > 4:
            table += struct.pack("<L", start + len(more))
            more += data + b"\0" * (len(data) % 2)
        else:
            table += data.ljust(4, b"\0")
    return table + struct.pack("<L", 0) + more


def linear_light(photo):
    """Linear values (H, W, 3) in 0..1 of an sRGB photograph, uint8."""
    unit = photo / 255
    return np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4)


def mosaic_of(linear, pattern):
    """The values (H, W) that a filter array leaves of (H, W, 3)."""
    height, width = linear.shape[:2]
    places = np.asarray(pattern)
    period = len(places)
    tiled = np.tile(places, (-(-height // period), -(-width // period)))[:height, :width]
    return np.take_along_axis(linear, tiled[..., None], 2)[..., 0]


def exposed(mosaic, gain, read, *, black=64, white=4095, seed=0):
    """Levels of a mosaic in 0..1 with shot noise of so many levels a photon, and read noise."""
    random = np.random.default_rng(seed)
    light = random.poisson(mosaic * (white - black) / gain) * gain
    levels = np.rint(light + black + read * random.standard_normal(mosaic.shape))
    return levels.clip(0, white).astype(np.uint16)
