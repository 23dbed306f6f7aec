"""Planes to R'G'B' and back against exact arithmetic in float64 by ITU-T H.273."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from lowtide.media.video.color import PlaneBuilder, rgb_rows
from lowtide.media.video.picture_format import ColorTags, PictureFormat

BT_601, BT_709, BT_2020 = 6, 1, 9
SHARES = {BT_601: (0.299, 0.114), BT_709: (0.2126, 0.0722), BT_2020: (0.2627, 0.0593)}
OFFSETS = {0: (0, 0.5), 1: (0, 0.5), 2: (0.5, 0.5), 3: (0, 0), 4: (0.5, 0), 5: (0, 1), 6: (0.5, 1)}
NAMES = (
    "yuv420p yuv420p10le yuv420p16le yuv422p12le yuv440p yuv444p yuv444p10be gray gray10le gbrp"
    " gbrp12le rgb24 bgr0 rgb48le"
).split()
SIZES = [(64, 48), (63, 47), (1, 1), (2, 3), (5, 2), (3, 70)]


def noise(format: PictureFormat, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, 1 << format.bits, shape).astype(format.plane_dtype)
        for shape in format.plane_shapes
    ]


def tagged(matrix: int, full: bool) -> ColorTags:
    return ColorTags(matrix=matrix, full_range=full)


def written(format: PictureFormat, rgb: np.ndarray, high: int = 0) -> list[np.ndarray]:
    rows, high = PlaneBuilder(format), high or format.height
    for first in range(0, format.height, high):
        rows.write(first, rgb[first : first + high])
    return rows.planes


def levels(format: PictureFormat, chroma: bool) -> tuple[int, int]:
    """Code of zero, and codes from there to one."""
    unit = 1 << (format.bits - 8)
    if format.full_range_used:
        return 128 * unit * chroma, (1 << format.bits) - 1
    return (128 * unit, 224 * unit) if chroma else (16 * unit, 219 * unit)


def interpolated(plane: np.ndarray, step: int, offset: float, count: int) -> np.ndarray:
    places = (np.arange(count) - offset) / step
    return np.array([np.interp(places, np.arange(len(row)), row) for row in plane])


def exact_rgb(planes: list[np.ndarray], format: PictureFormat) -> np.ndarray:
    zero, count = levels(format, chroma=False)
    first = (planes[0].astype(float) - zero) / count
    if format.kind == "gray":
        return np.stack([first] * 3, -1)
    if format.kind == "rgb":
        return np.stack([(plane.astype(float) - zero) / count for plane in planes], -1)
    (across, down), (right, below) = format.chroma_step, OFFSETS[format.chroma_location]
    zero, count = levels(format, chroma=True)
    chroma = []
    for plane in planes[1:]:
        part = interpolated(
            (plane.astype(float) - zero) / count, across, right * (across > 1), format.width
        )
        chroma.append(interpolated(part.T, down, below * (down > 1), format.height).T)
    kr, kb = SHARES[format.matrix_used]
    red, blue = first + 2 * (1 - kr) * chroma[1], first + 2 * (1 - kb) * chroma[0]
    return np.stack([red, (first - kr * red - kb * blue) / (1 - kr - kb), blue], -1)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_exact_arithmetic(name):
    sizes = itertools.cycle([(64, 48), (63, 47), (2, 3), (1, 1), (7, 12)])
    for location, matrix, full in itertools.product((0, 2, 3, 6), SHARES, (False, True)):
        width, height = next(sizes)
        format = PictureFormat(width, height, name, tagged(matrix, full), location)
        planes = noise(format)
        found = rgb_rows(planes, format, 0, height)
        assert found.shape == (height, width, 3)
        assert found.dtype == np.float32
        assert np.abs(found - exact_rgb(planes, format)).max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_an_identity_gives_the_very_codes_back(name):
    """Report VideoHelperSuite 642: colors drifted with every round of reading and writing."""
    for (width, height), location, full in itertools.product(SIZES, range(5), (False, True)):
        format = PictureFormat(width, height, name, ColorTags(full_range=full), location)
        planes = noise(format)
        for found, plane in zip(
            written(format, rgb_rows(planes, format, 0, height)), planes, strict=True
        ):
            assert found.dtype == plane.dtype
            assert np.array_equal(found, plane), (width, height, location)


@pytest.mark.parametrize("name", "yuv420p yuv422p10le yuv440p gbrp".split())
@pytest.mark.parametrize("location", [0, 2, 3, 6])
def test_bands_of_any_height_give_the_same_bits(name, location):
    format = PictureFormat(33, 47, name, chroma_location=location)
    planes = noise(format)
    whole = rgb_rows(planes, format, 0, 47)
    stored = written(format, whole)
    for high in (1, 2, 3, 8, 46):
        bands = [rgb_rows(planes, format, at, min(at + high, 47)) for at in range(0, 47, high)]
        assert np.array_equal(np.concatenate(bands), whole)
        again = written(format, whole, high)
        assert all(np.array_equal(a, b) for a, b in zip(again, stored, strict=True))
    assert rgb_rows(planes, format, 47, 47).shape == (0, 33, 3)


def test_interleaved_rows_are_taken_too():
    format = PictureFormat(33, 21, "yuv420p10le")
    rgb = rgb_rows(noise(format), format, 0, 21)
    plain = written(format, np.ascontiguousarray(rgb))
    assert all(np.array_equal(a, b) for a, b in zip(plain, written(format, rgb), strict=True))


def test_a_ramp_of_10_bits_keeps_880_of_880_luma_codes():
    format = PictureFormat(880, 4, "yuv420p10le")
    luma = np.tile(np.arange(64, 944, dtype=np.uint16), (4, 1))
    planes = [luma, *(np.full((2, 440), 512, np.uint16) for _ in range(2))]
    found = written(format, rgb_rows(planes, format, 0, 4))
    assert len(np.unique(found[0])) == 880
    assert all(np.array_equal(a, b) for a, b in zip(found, planes, strict=True))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", SHARES)
@pytest.mark.parametrize("name", "yuv420p yuv422p10le yuv444p16le".split())
def test_colors_are_the_nearest_codes(name, matrix, full):
    format = PictureFormat(16, 16, name, tagged(matrix, full))
    kr, kb = SHARES[matrix]
    for color in np.random.default_rng(1).random((40, 3)):
        luma = kr * color[0] + (1 - kr - kb) * color[1] + kb * color[2]
        parts = luma, (color[2] - luma) / (2 - 2 * kb), (color[0] - luma) / (2 - 2 * kr)
        rgb = np.broadcast_to(color.astype(np.float32), (16, 16, 3))
        for place, (plane, value) in enumerate(zip(written(format, rgb), parts, strict=True)):
            zero, count = levels(format, chroma=place > 0)
            # Half a code, and what float32 leaves of 16 bits.
            assert np.abs(plane.astype(float) - (zero + count * value)).max() <= 0.51


def test_red_has_its_published_codes():
    red = np.zeros((4, 4, 3), np.float32)
    red[..., 0] = 1
    for matrix, codes in ((BT_709, (63, 102, 240)), (BT_601, (81, 90, 240))):
        planes = written(PictureFormat(4, 4, "yuv420p", tagged(matrix, False)), red)
        assert [set(plane.ravel().tolist()) for plane in planes] == [{code} for code in codes]


@pytest.mark.parametrize(("name", "largest"), [("yuv420p", 255), ("yuv420p10le", 1023)])
def test_values_beyond_the_codes_are_clipped(name, largest):
    for value, code in ((-9, 0), (9, largest)):
        rgb = np.full((4, 4, 3), value, np.float32)
        assert set(written(PictureFormat(4, 4, name), rgb)[0].ravel().tolist()) == {code}


def test_halves_are_rounded_up():
    format = PictureFormat(4, 1, "gbrp16le")
    values = np.array([0, 0.5, 1.5, 2.4999], np.float32) / 65535
    planes = written(format, np.repeat(values[None, :, None], 3, 2))
    assert planes[0].tolist() == [[0, 1, 2, 2]]


def test_a_smooth_color_ramp_keeps_its_shape():
    """Chroma neither moves nor gains: it is sampled where its location says."""
    for location, (right, below) in OFFSETS.items():
        format = PictureFormat(64, 32, "yuv420p16le", tagged(BT_709, True), location)
        across, down = np.arange(64) / 128, np.arange(32)[:, None] / 128
        rgb = np.zeros((32, 64, 3), np.float32)
        rgb[..., 2] = across + down / 2
        plane = written(format, rgb)[1].astype(float)
        expected = (0.5 / 128 * (2 * np.arange(32) + right)) + (
            0.25 / 128 * (2 * np.arange(16) + below)[:, None]
        )
        inner = np.s_[2:-2, 2:-2]
        assert np.abs((plane - 32768) / 65535 - expected)[inner].max() < 2 / 65535


def test_only_the_rows_asked_for_are_held():
    format = PictureFormat(256, 4096, "yuv420p")
    planes = noise(format)
    tracemalloc.start()
    try:
        rgb_rows(planes, format, 2000, 2016)
        assert tracemalloc.get_traced_memory()[1] < 12 * 16 * 256 * 4
        rows = PlaneBuilder(format)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        band = np.zeros((16, 256, 3), np.float32)
        for first in range(0, 4096, 16):
            rows.write(first, band)
        assert tracemalloc.get_traced_memory()[1] - held < 16 * 16 * 256 * 4
    finally:
        tracemalloc.stop()


def test_rows_come_in_order_and_all_of_them():
    format = PictureFormat(8, 8, "yuv420p")
    rows, band = PlaneBuilder(format), np.zeros((4, 8, 3), np.float32)
    rows.write(0, band)
    for first, values in ((0, band), (5, band), (4, band[:, :7]), (4, np.zeros((5, 8, 3)))):
        with pytest.raises(ValueError, match="row 4 of 8×8 is next"):
            rows.write(first, values)
    with pytest.raises(ValueError, match="4 of 8 rows"):
        _ = rows.planes
    rows.write(4, band)
    assert [plane.shape for plane in rows.planes] == [(8, 8), (4, 4), (4, 4)]
