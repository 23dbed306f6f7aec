"""Camera RAW files: every filter array in and out, levels, development, and files that are none."""

from pathlib import Path

import numpy as np
import pytest

from lowtide import ImageError, UsageError
from lowtide.media.discover import IMAGES, RAW_FILES, count_by_kind, discover_files
from lowtide.media.encode import EncodeOptions
from lowtide.media.raw_facts import inspect_raw, raw_result
from lowtide.media.raw_file import MosaicLayout
from support.raw_files import BAYER, XTRANS, write_dng

pytest.importorskip("rawpy")
from lowtide.media.raw_file import RawFile

PATTERNS = {**BAYER, "XTRANS": XTRANS}
MOST = 10**9


@pytest.fixture
def levels():
    """Levels of a mosaic, (37, 51), from black to white."""
    return np.random.default_rng(0).integers(64, 4095, (37, 51))


@pytest.mark.parametrize("name", PATTERNS)
def test_planes_are_the_places_of_the_filter_array(name, levels, tmp_path):
    raw = RawFile(write_dng(tmp_path / "a.dng", levels, PATTERNS[name]))
    assert np.array_equal(raw.values, levels)
    period = len(PATTERNS[name])
    letters = np.array(list(raw.names))[raw.colors]
    assert np.array_equal(letters, np.array(list("RGB"))[np.array(PATTERNS[name])])
    layout = MosaicLayout(period)
    info = layout.info(levels.shape)
    planes = layout.gather(raw.values, 0, info.height)
    assert planes.shape == info.shape == (-(-37 // period), -(-51 // period), period**2)
    for place in range(period**2):
        plane = levels[place // period :: period, place % period :: period]
        assert np.array_equal(planes[: len(plane), : plane.shape[1], place], plane)
    raw.close()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (2, 3), (5, 6), (7, 7), (12, 13)])
@pytest.mark.parametrize(
    "layout", [MosaicLayout(2), MosaicLayout(6), MosaicLayout(1, 1, 1)], ids=str
)
def test_every_size_comes_back_from_its_planes(layout, shape):
    mosaic = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) + 1
    height = layout.info(shape).height
    back = np.zeros_like(mosaic)
    for first in range(0, height, 2):
        last = min(first + 2, height)
        layout.scatter(layout.gather(mosaic, first, last), first, back)
    assert np.array_equal(back, mosaic)


def test_what_lies_beyond_a_mosaic_has_the_color_of_its_place():
    mosaic = np.add.outer(np.arange(5) % 2 * 2, np.arange(7) % 2).astype(np.uint16)
    planes = MosaicLayout(2).gather(mosaic, 0, 3)
    assert all((planes[..., place] == place).all() for place in range(4))
    shifted = MosaicLayout(1, 1, 1).gather(mosaic, 0, 6)[..., 0]
    assert np.array_equal(shifted[1:, 1:], mosaic) and (shifted[0, 1::2] == 2).all()


def test_facts_are_those_of_the_file(levels, tmp_path):
    path = write_dng(tmp_path / "a.dng", levels, black=[60, 61, 62, 63], iso=1600, orientation=6)
    facts = inspect_raw(path, max_pixels=MOST)
    assert (facts.colors, facts.period, facts.iso) == ("RGGB", 2, 1600)
    assert (facts.black_levels, facts.white) == ((60, 61, 62, 63), 4095)
    assert facts.frame.size == (37, 51)  # upright
    assert inspect_raw(path, max_pixels=MOST, black_level=50).black == 50
    assert inspect_raw(write_dng(tmp_path / "b.dng", levels, iso=None), max_pixels=MOST).iso is None
    with pytest.raises(ImageError, match="is 1,887 pixels and the limit is 100"):
        inspect_raw(path, max_pixels=100)


def test_linear_development_is_in_proportion_to_light(tmp_path):
    values = []
    for level in (64, 1072, 2080, 4095):
        raw = RawFile(write_dng(tmp_path / "a.dng", np.full((30, 40), level)))
        if level == 64:
            with pytest.raises(ImageError, match="the development is all black: levels are 64 to"):
                raw.develop(bits=16, linear=True)
        else:
            picture = raw.develop(bits=16, linear=True)
            assert picture.shape == (30, 40, 3) and picture.dtype == np.uint16
            values.append(float(picture[..., 1].mean()))
        raw.close()
    assert values[0] * 2 == pytest.approx(values[1], rel=1e-2)


def test_a_given_black_level_is_that_of_the_development(tmp_path):
    raw = RawFile(write_dng(tmp_path / "a.dng", np.full((30, 40), 1072), black=0), 64)
    given = raw.develop(bits=16, linear=True)
    raw.close()
    raw = RawFile(write_dng(tmp_path / "b.dng", np.full((30, 40), 1072), black=64))
    assert np.array_equal(raw.develop(bits=16, linear=True), given)
    raw.close()


def dark_picture(black, sigma=3.0, shape=(200, 300)):
    """Levels of a picture with dark parts, above a true black level."""
    random = np.random.default_rng(1)
    light = 2000 * np.linspace(0, 1, shape[1])[None].repeat(shape[0], 0) ** 3
    return np.rint(black + light + sigma * random.standard_normal(shape)).clip(0, 16383)


@pytest.mark.parametrize(
    ("true", "said", "words"),
    [
        (64, 128, "black level is 128, and the darkest parts of the data are at .*may be doubled"),
        (1023, 2046, "black level is 2046, and the darkest parts"),
        (
            512,
            0,
            r"black level is 0, and the data begin at (49|50)\d of 16383: it is not in the file",
        ),
        (0, 16383, "is not below the white level"),
    ],
)
def test_a_wrong_black_level_is_refused(true, said, words, tmp_path):
    path = write_dng(tmp_path / "a.dng", dark_picture(true), black=said, white=16383)
    with pytest.raises(ImageError, match=words) as caught:
        inspect_raw(path, max_pixels=MOST)
    assert "--black-level" in (caught.value.hint or "") and str(path) in caught.value.message
    assert inspect_raw(path, max_pixels=MOST, black_level=true).black == true


@pytest.mark.parametrize(("black", "sigma"), [(64, 3), (64, 25), (512, 60), (0, 3)])
def test_a_right_black_level_is_accepted_in_any_noise(black, sigma, tmp_path):
    path = write_dng(tmp_path / "a.dng", dark_picture(black, sigma), black=black, white=16383)
    assert inspect_raw(path, max_pixels=MOST).notes == ()


def test_data_a_little_above_a_black_level_of_0_have_a_note(tmp_path):
    path = write_dng(tmp_path / "a.dng", dark_picture(40), black=0, white=16383)
    (note,) = inspect_raw(path, max_pixels=MOST).notes
    assert "black level 0, and its data begin at" in note


def test_files_that_are_no_raw_are_refused(levels, tmp_path):
    good = write_dng(tmp_path / "a.dng", levels).read_bytes()
    jpeg = b"\xff\xd8\xff\xe0" + bytes(100)
    for content, words in (
        (b"", "the file is empty"),
        (b"hello " * 50, "no camera RAW file, but a text file"),
        (jpeg, "no camera RAW file, but a JPEG by its content"),
        (good[: len(good) // 2], "damaged, cut short or unsupported"),
        (good[:60], "damaged, cut short or unsupported"),
    ):
        path = tmp_path / "bad.dng"
        path.write_bytes(content)
        with pytest.raises(ImageError, match=words):
            inspect_raw(path, max_pixels=MOST)
    with pytest.raises(ImageError, match=r"none.dng: no such file"):
        inspect_raw(tmp_path / "none.dng", max_pixels=MOST)


@pytest.mark.parametrize("side", [1, 2, 5, 7])
def test_mosaics_that_libraw_finds_too_small_are_refused(side, tmp_path):
    path = write_dng(tmp_path / "a.dng", np.full((side, side), 99))
    with pytest.raises(ImageError, match="damaged, cut short or unsupported") as caught:
        inspect_raw(path, max_pixels=MOST)
    assert "at least 22 × 22" in (caught.value.hint or "")


def test_the_output_goes_by_the_suffix_and_needs_16_bits(levels, tmp_path):
    path = write_dng(tmp_path / "a.dng", levels)
    facts = inspect_raw(path, max_pixels=MOST)

    def result(name, output="auto"):
        return raw_result(facts, path, tmp_path / name, output, EncodeOptions(), None)

    shown = {name: result(name) for name in ("a.tif", "a.png", "a.jpg", "a")}
    assert [one.output for one in shown.values()] == ["linear", "developed", "developed", "linear"]
    assert [one.info.sample_type for one in shown.values()] == [
        "uint16",
        "uint16",
        "uint8",
        "uint16",
    ]
    assert result("a.tif", "mosaic").info.shape == (37, 51, 1)
    for output in ("linear", "mosaic"):
        with pytest.raises(UsageError, match="JPEG does not hold the 16 bits") as caught:
            result("a.jpg", output)
        assert "a.tif" in (caught.value.hint or "")
    small = inspect_raw(write_dng(tmp_path / "x.dng", levels, XTRANS), max_pixels=MOST)
    with pytest.raises(ImageError, match="X-Trans files only from 512") as caught:
        raw_result(small, path, tmp_path / "a.tif", "auto", EncodeOptions(), None)
    assert "--raw-output mosaic" in (caught.value.hint or "")


def test_names_tell_the_kind_of_inputs(tmp_path):
    for name in ("in/a.NEF", "in/a.jpg", "in/b.dng", "in/c.txt", "in/out/b.tif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    folder, out = tmp_path / "in", tmp_path / "in" / "out"
    assert count_by_kind([folder], out, [IMAGES, RAW_FILES]) == [1, 2]
    found = discover_files([folder], out, kind=RAW_FILES)
    assert [one.target.name for one in found.pairs] == ["a.tif", "b.tif"]
    reasons = {one.path.name: one.reason for one in found.skipped}
    assert reasons["a.jpg"] == "an image"
    named = discover_files([folder], out, kind=RAW_FILES, format="jpg", suffix_text="_dev")
    assert [one.target.name for one in named.pairs] == ["a_dev.jpg", "b_dev.jpg"]
    assert discover_files([folder / "a.NEF"], tmp_path / "z.jpg", kind=RAW_FILES).single_file
    with pytest.raises(UsageError, match="names no image format that Lowtide writes"):
        discover_files([folder / "a.NEF"], tmp_path / "z.nef", kind=RAW_FILES)


def test_the_kodak_file_goes_through_with_a_note(data_folder):
    path = Path(data_folder) / "raw" / "kodak_dc50.kdc"
    if not path.is_file():
        pytest.skip("the Kodak file is not in the data folder")
    facts = inspect_raw(path, max_pixels=MOST)
    assert (facts.colors, facts.iso, facts.white) == ("GRBG", 84, 16383)
    assert facts.notes == (
        "the file says black level 0, and its data begin at 23 of 16383; --black-level N sets it",
    )
