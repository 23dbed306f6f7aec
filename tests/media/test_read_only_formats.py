"""Formats that are only read: GIF, BMP, and HEIC with its extra."""

import base64
import sys

import numpy as np
import pytest
from PIL import Image, ImageCms

import lowtide
from lowtide import ImageError, UsageError
from lowtide.media import inspect_image, open_image

BUDGET = "256MiB"
# 96 × 64, 10 bits: 4 levels of red more from column to column, green 800 everywhere, blue 0.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWl4AAAAAG1pZjFoZWl4bWlhZgAAAVNtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAA"
    "AAAAACJpbG9jAAAAAERAAAEAAQAAAAABdwABAAAAAAAAAJYAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAA"
    "AA5waXRtAAAAAAABAAAA02lwcnAAAAC0aXBjbwAAAHVodmNDAQQIAAAAnbgAAAAAHvAA/P36+gAADwNgAAEAF0ABDAH//wQI"
    "AAADAJ24AAADAAAeugJAYQABAClCAQEECAAAAwCduAAAAwAAHqAwgQTZbqSSmubgIaDAgAAADIAAAAMAhGIAAQAHRAHBcrAi"
    "QAAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABgAAAAQAAAABBwaXhpAAAAAAMKCgoAAAAXaXBtYQAAAAAAAAAB"
    "AAEEgQIDBAAAAJ5tZGF0AAAAkigBrwY45be+WFqhz1mtaDf6M9tmi9I+JVcULJMY18WrtB7O/5lxSDb6iIsj3Z/4a2E3zHU2"
    "iVmN5SclsqO6nTMeelS2oA2RonLvPJ82Ob8P9f/q3/igadggV7bP9r/jwjtXtZczI0+ybsbykDtfW2g/mx5R9fu5aLa4hm+g"
    "QkrrkmcnFcTqiN/8j8o+wwJndB/A"
)


pytestmark = pytest.mark.usefixtures("quick")


def rows_of(path):
    with open_image(path) as source:
        assert source.shape == inspect_image(path).info.shape
        return source.read(0, source.shape[0])


def test_bmp_of_any_depth_is_read(piece, tmp_path):
    for image in (
        Image.fromarray(piece),
        Image.fromarray(piece[..., 0]),
        Image.fromarray(piece).convert("P"),
        Image.fromarray(piece[..., 0] > 90),
    ):
        image.save(tmp_path / "a.bmp")
        shown = np.asarray(image.convert("RGB"))
        assert np.array_equal(np.broadcast_to(rows_of(tmp_path / "a.bmp"), shown.shape), shown)


def test_results_are_what_those_of_a_png_are(piece, tmp_path, save, read):
    for name in ("a.bmp", "a.gif"):
        with Image.fromarray(piece) as image:
            image.quantize(200).save(tmp_path / name)
        save(tmp_path / "same.png", rows_of(tmp_path / name))
        for source, target in ((name, "out.png"), ("same.png", "same_out.png")):
            lowtide.upscale(tmp_path / source, tmp_path / target, budget=BUDGET, force=True)
        assert np.array_equal(read(tmp_path / "out.png"), read(tmp_path / "same_out.png"))


def test_results_named_after_inputs_are_png(piece, tmp_path):
    (tmp_path / "in").mkdir()
    Image.fromarray(piece).save(tmp_path / "in" / "a.bmp")
    Image.fromarray(piece).save(tmp_path / "in" / "b.gif")
    Image.fromarray(piece).save(tmp_path / "in" / "c.jpg")
    report = lowtide.upscale(tmp_path / "in", tmp_path / "out", budget=BUDGET)
    assert [one.status for one in report.images] == ["done"] * 3
    assert sorted(one.name for one in (tmp_path / "out").glob("[a-c].*")) == [
        "a.png",
        "b.png",
        "c.jpg",
    ]
    lowtide.upscale(tmp_path / "in" / "a.bmp", tmp_path / "plain", budget=BUDGET)
    with Image.open(tmp_path / "plain") as image:
        assert image.format == "PNG"
    with pytest.raises(UsageError, match="names no image format that Lowtide writes"):
        lowtide.upscale(tmp_path / "in" / "a.bmp", tmp_path / "out.bmp", budget=BUDGET)


def test_of_an_animation_the_first_picture_is_read_with_a_note(piece, tmp_path):
    frames = [Image.fromarray(piece), Image.fromarray(255 - piece)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert "page 1 of 2 read" in inspect_image(tmp_path / "a.gif").notes


@pytest.mark.parametrize("name", ["a.bmp", "a.gif"])
def test_files_that_were_cut_short_are_refused(name, piece, tmp_path):
    Image.fromarray(piece).save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match="damaged"):
        rows_of(tmp_path / name)


def test_heic_is_read_with_its_extra(tmp_path):
    pytest.importorskip("pi_heif")
    (tmp_path / "a.heic").write_bytes(HEIC)
    rows = rows_of(tmp_path / "a.heic")
    assert rows.shape == (64, 96, 3) and rows.dtype == np.uint16
    assert np.abs(rows[..., 1] / 65535 * 255 - 200).max() < 3
    assert np.abs(rows[20, :, 0] / 65535 * 255 - np.arange(96)).max() < 4
    report = lowtide.upscale(tmp_path / "a.heic", tmp_path / "out.png", budget=BUDGET)
    assert report.images[0].notes == ["10-bit samples expanded to 16 bits"]
    (tmp_path / "a.heic").write_bytes(HEIC[:300])
    with pytest.raises(ImageError, match="damaged or unsupported HEIC"):
        rows_of(tmp_path / "a.heic")


def test_without_it_the_hint_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    (tmp_path / "a.heic").write_bytes(HEIC)
    with pytest.raises(ImageError, match="HEIC needs pi-heif") as caught:
        inspect_image(tmp_path / "a.heic")
    assert "pip install '.[heic]'" in (caught.value.hint or "")


def test_tiff_of_lab_is_converted(piece, tmp_path):
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(Image.fromarray(piece), *profiles, outputMode="LAB")
    assert lab is not None
    lab.save(tmp_path / "a.tif")
    assert np.abs(rows_of(tmp_path / "a.tif").astype(int) - piece).mean() < 2
    assert inspect_image(tmp_path / "a.tif").notes == ("lab converted to sRGB",)
