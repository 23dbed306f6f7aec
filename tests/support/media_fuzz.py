"""Damaged pictures by seed: small ones of every format, with bytes changed, cut, moved, and with
headers that lie about their size."""

import functools
import random
import struct
import zlib

import numpy as np
import pyvips

KINDS = ("png", "jpg", "tif", "webp", "avif")
# What a header may say of a side, and of anything else that is a number.
_SIDES = (0, 1, 7, 255, 4096, 30_000, 65_535, 2**31 - 1, 2**32 - 1)


def fuzzed(kind: str, seed: int | None) -> bytes:
    """The damaged picture of one seed; None: a good one whose header says 30,000 × 30,000."""
    if seed is None:
        data = bytearray(whole(kind)[0])
        _lie(data, random.Random(0), (30_000, 30_000))
        return _summed(data) if kind == "png" else bytes(data)
    chance = random.Random(f"{kind} {seed}")
    data = bytearray(chance.choice(whole(kind)))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        chance.choice((*_DAMAGES, _lie, _lie, _lie))(data, chance)
        if len(data) < 48:
            break
    # With sums that are right, what lies deeper is reached.
    return _summed(data) if kind == "png" and chance.random() < 0.7 else bytes(data)


@functools.cache
def whole(kind: str) -> list[bytes]:
    """Good pictures of a format, of all sorts that it has."""
    y, x = np.mgrid[:61, :83]
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin(x / 5 + y / 11), x / 83], axis=-1)
    rgba = pyvips.Image.new_from_array(((waves + 1) * 127).astype(np.uint8))
    rgba = rgba.copy(interpretation="srgb")
    rgb, gray = rgba[:3], rgba[0].copy(interpretation="b-w")
    deep = (rgb.cast("ushort") * 257).cast("ushort").copy(interpretation="rgb16")
    turned = rgb.copy()
    turned.set_type(pyvips.GValue.gint_type, "orientation", 6)
    turned.set_type(pyvips.GValue.gstr_type, "exif-ifd0-Make", "Maker (Maker, ASCII, 5 components)")
    turned.set_type(pyvips.GValue.blob_type, "xmp-data", b"<x:xmpmeta/>")
    float_rgb = (rgb / 255).cast("float").copy(interpretation="scrgb")
    made = {
        "png": [
            (rgb, {}),
            (rgba, {}),
            (gray, {}),
            (deep, {}),
            (turned, {}),
            (rgb, {"interlace": True}),
            (rgb, {"palette": True}),
            (gray, {"bitdepth": 1}),
        ],
        "jpg": [
            (rgb, {}),
            (gray, {}),
            (turned, {}),
            (rgb, {"interlace": True}),
            (rgb.colourspace("cmyk"), {}),
            (rgb, {"restart_interval": 4}),
        ],
        "tif": [
            (rgb, {}),
            (rgba, {"compression": "deflate"}),
            (deep, {"compression": "lzw"}),
            (float_rgb, {"compression": "deflate"}),
            (turned, {"compression": "packbits"}),
            (rgb, {"tile": True, "tile_width": 32, "tile_height": 32, "pyramid": True}),
            (gray, {"bigtiff": True}),
            (rgb, {"compression": "jpeg", "tile": True}),
        ],
        "webp": [(rgb, {}), (rgba, {}), (turned, {}), (rgb, {"lossless": True})],
        "avif": [(rgb, {}), (rgba, {}), (deep, {"bitdepth": 12}), (turned, {})],
    }
    ending = {"avif": ".avif", "tif": ".tif"}.get(kind, f".{kind}")
    effort = {"effort": 0} if kind == "avif" else {}
    return [image.write_to_buffer(ending, **options, **effort) for image, options in made[kind]]


def _change(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 3, 20))):
        data[chance.randrange(len(data))] = chance.randrange(256)


def _begin(data: bytearray, chance: random.Random) -> None:
    """Bytes near the start, where headers are, but for what says which format it is."""
    for _ in range(chance.choice((1, 2, 5))):
        data[chance.randrange(12, min(len(data), 300))] = chance.choice((0, 1, 127, 128, 255))


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(12, len(data)) :]


def _move(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(12, len(data))
    piece = data[start : start + chance.choice((1, 4, 60))]
    if chance.random() < 0.5:
        del data[start : start + len(piece)]
    place = chance.randrange(12, len(data) + 1)
    data[place:place] = piece


def _fill(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(12, len(data))
    size = chance.choice((4, 16, 200))
    data[start : start + size] = bytes([chance.choice((0, 255))]) * min(size, len(data) - start)


def _append(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice((1, 100, 5000)))


_DAMAGES = (_change, _begin, _cut, _move, _fill, _append)


def _lie(data: bytearray, chance: random.Random, sides: tuple[int, int] | None = None) -> None:
    """Another width, height or other number in the header of whichever format it is."""
    pair = sides or (chance.choice(_SIDES), chance.choice(_SIDES))
    if data[:4] == b"\x89PNG":
        struct.pack_into(">LL", data, 16, *pair)
        if sides is None and chance.random() < 0.3:
            data[chance.choice((24, 25, 28))] = chance.randrange(17)
    elif data[:2] == b"\xff\xd8":
        markers = (b"\xff\xc0", b"\xff\xc2")
        at = max(data.find(marker) for marker in markers)
        if 0 <= at < len(data) - 10:
            struct.pack_into(">HH", data, at + 5, *(side & 0xFFFF for side in pair))
    elif data[:2] in (b"II", b"MM"):
        tags = (256, 257) if sides else (chance.choice(_TIFF_TAGS),)
        _lie_in_tiff(data, tags, pair[0])
    elif data[8:12] == b"WEBP" and len(data) > 40:
        low = struct.pack("<HH", *(side & 0x3FFF for side in pair))
        place = {b"VP8 ": 26, b"VP8L": 21, b"VP8X": 24}.get(bytes(data[12:16]), 26)
        data[place : place + 4] = low
    else:
        at = data.find(b"ispe")
        if 0 <= at < len(data) - 16:
            struct.pack_into(">LL", data, at + 8, *pair)


# Width, height, bits, compression, color, offsets, bands, rows of a strip, sizes, tiles, below.
_TIFF_TAGS = (256, 257, 258, 259, 262, 273, 277, 278, 279, 322, 323, 324, 330)


def _lie_in_tiff(data: bytearray, tags: tuple[int, ...], value: int) -> None:
    big = data[2] == 43
    try:
        (at,) = struct.unpack_from("<Q" if big else "<L", data, 8 if big else 4)
        (entries,) = struct.unpack_from("<Q" if big else "<H", data, at)
        size, first = (20, at + 8) if big else (12, at + 2)
        for place in range(first, first + size * min(entries, 100), size):
            if struct.unpack_from("<H", data, place)[0] in tags:
                struct.pack_into("<HL", data, place + 2, 4, 1)
                struct.pack_into("<L", data, place + size - (8 if big else 4), value)
    except struct.error:
        return


def _summed(data: bytearray) -> bytes:
    at = 8
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">L", data, at)
        if at + 12 + size > len(data):
            break
        struct.pack_into(">L", data, at + 8 + size, zlib.crc32(data[at + 4 : at + 8 + size]))
        at += 12 + size
    return bytes(data)
