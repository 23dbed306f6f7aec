"""The default upscaler is chosen by what the files show of having been JPEGs."""

import pytest
import pyvips
import skimage.data

import lowtide


@pytest.fixture
def picture():
    return pyvips.Image.new_from_array(skimage.data.coffee()[:120, 200:400])


def chosen(report):
    return report.model["name"], report.model_choice


@pytest.mark.parametrize(
    ("quality", "suffix", "name", "reason"),
    [
        (40, "jpg", "lowtide-photo-x2", "a JPEG of quality about 40"),
        (85, "jpg", "lowtide-photo-x2", "a JPEG of quality about 85"),
        (97, "jpg", "lowtide-x2", "no trace of strong JPEG coding"),
        (40, "png", "lowtide-photo-x2", "made from a JPEG, whose blocks it shows"),
        (None, "png", "lowtide-x2", "no trace of strong JPEG coding"),
        (None, "tif", "lowtide-x2", "no trace of strong JPEG coding"),
    ],
)
def test_a_picture_chooses_its_model(picture, tmp_path, quality, suffix, name, reason):
    if quality is not None:
        picture = pyvips.Image.jpegload_buffer(picture.jpegsave_buffer(Q=quality))
    source = tmp_path / f"a.{suffix}"
    picture.write_to_file(f"{source}[Q={quality}]" if suffix == "jpg" else str(source))
    assert chosen(lowtide.plan(source, tmp_path / "b.png")) == (name, reason)
    large = lowtide.plan(source, tmp_path / "b.png", scale=4)
    assert large.model["name"] == name.replace("x2", "x4")
    named = lowtide.plan(source, tmp_path / "b.png", model="lowtide-large-x2")
    assert chosen(named) == ("lowtide-large-x2", "")


def test_a_cropped_picture_shows_its_blocks_too(picture, tmp_path):
    coded = pyvips.Image.jpegload_buffer(picture.jpegsave_buffer(Q=50))
    coded.crop(3, 5, 190, 110).write_to_file(str(tmp_path / "a.png"))
    assert lowtide.plan(tmp_path / "a.png", tmp_path / "b.png").model["name"] == "lowtide-photo-x2"


def test_a_folder_has_one_model_and_keeps_it(picture, tmp_path):
    small, folder, out = picture.crop(0, 0, 64, 48), tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(2):
        small.write_to_file(str(folder / f"{number}.jpg[Q=60]"))
    small.write_to_file(str(folder / "clean.png"))
    wanted = "lowtide-photo-x2", "2 of 3 pictures are or were JPEGs"
    assert chosen(lowtide.upscale(folder, out)) == wanted
    for number in range(4):
        small.write_to_file(str(folder / f"more{number}.png"))
    again = lowtide.upscale(folder, out)
    assert chosen(again) == ("lowtide-photo-x2", "as earlier files in the output folder")
    assert [item.status for item in again.images].count("skipped") == 3
