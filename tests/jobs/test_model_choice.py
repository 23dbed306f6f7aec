"""The default upscaler is chosen by what the files show of having been JPEGs."""

import numpy as np
import pytest
import pyvips
import skimage.data

import lowtide
from lowtide.jobs.images.model_choice import suited_upscaler
from lowtide.media import coding_traces


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


def clip(path, codec, picture, fade=0, **options):
    """60 frames of a picture, the first ``fade`` of them black."""
    av = pytest.importorskip("av")
    shown = np.ascontiguousarray(picture.numpy())
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=25, options={"g": "30", **options})
        stream.width, stream.height = picture.width, picture.height
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for place in range(60):
            frame = av.VideoFrame.from_ndarray(shown * (place >= fade), "rgb24")
            output.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        output.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("codec", "options", "name"),
    [
        ("libx264", {"crf": "30"}, "lowtide-photo-x2"),
        ("libx264", {"crf": "33", "fade": 20}, "lowtide-photo-x2"),
        ("libx264", {"crf": "6"}, "lowtide-x2"),
        ("libx264", {"crf": "6", "fade": 20}, "lowtide-x2"),
        ("ffv1", {}, "lowtide-x2"),
        ("libx265", {"crf": "30", "x265-params": "log-level=none"}, "lowtide-photo-x2"),
        ("libx265", {"crf": "12", "x265-params": "log-level=none"}, "lowtide-x2"),
    ],
)
def test_a_clip_chooses_its_model_once(picture, tmp_path, codec, options, name):
    source = clip(tmp_path / "in.mkv", codec, picture, **options)
    report = lowtide.video(source, tmp_path / "out.mkv", dry_run=True)
    said = "key frames have" if "photo" in name else "no trace of strong coding"
    assert report.model["name"] == name and said in report.model_choice
    large = lowtide.video(source, tmp_path / "out.mkv", dry_run=True, scale=4)
    assert large.model["name"] == name.replace("x2", "x4")
    named = lowtide.video(source, tmp_path / "out.mkv", dry_run=True, model="lowtide-x2")
    assert chosen(named) == ("lowtide-x2", "")


def test_images_of_a_clip_are_pictures(picture, tmp_path):
    coded = pyvips.Image.jpegload_buffer(picture.jpegsave_buffer(Q=40))
    for number in range(3):
        coded.write_to_file(str(tmp_path / f"{number:03}.png"))
    pytest.importorskip("av")
    report = lowtide.video(tmp_path / "%03d.png", tmp_path / "o.mkv", dry_run=True, fps=25)
    assert chosen(report) == ("lowtide-photo-x2", "3 of 3 pictures are or were JPEGs")


def test_of_many_pictures_some_are_looked_at(picture, tmp_path, monkeypatch):
    looked_at = []
    monkeypatch.setattr(coding_traces, "jpeg_trace", lambda path: looked_at.append(path) or "")
    files = [tmp_path / f"{number}.png" for number in range(100)]
    assert suited_upscaler(files, 2) == ("lowtide-x2", "no trace of strong JPEG coding")
    assert 8 <= len(looked_at) <= 16 and looked_at[-1] in files[90:]
