"""Image files as frames: their names, what they have to have alike, and how they are turned."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("av")

from lowtide import UsageError, VideoError
from lowtide.media.video.frame_pattern import FramePattern
from lowtide.media.video.frame_sequence import (
    FrameSequenceReader,
    inspect_sequence,
    sequence_part,
    upright_planes,
    write_frame,
)
from lowtide.media.video.video_facts import display_matrix


def images(folder: Path, *names: str, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> None:
    folder.mkdir(exist_ok=True)
    for place, name in enumerate(names):
        generator = np.random.default_rng(place)
        shape = (size[1], size[0], len(mode)) if len(mode) > 1 else (size[1], size[0])
        Image.fromarray(generator.integers(0, 255, shape, np.uint8), mode).save(folder / name)


def part(pattern: FramePattern, fps: str | None = None):
    facts = inspect_sequence(pattern, fps)
    return sequence_part(facts, 0, facts.frames)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("0001.png", "0002.png"), "%04d.png"),
        (("shot2_v3_7.tif", "shot2_v3_8.tif"), "shot2_v3_%d.tif"),
        (("a9.PNG", "a10.PNG"), "a%d.PNG"),
        (("999.png", "1000.png"), "%03d.png"),
        (("readme.txt", "cover.png", "1.png"), "%d.png"),
    ],
)
def test_the_pattern_of_a_folder(tmp_path, names, pattern):
    for name in names:
        (tmp_path / name).touch()
    found = FramePattern.in_folder(tmp_path)
    assert found is not None and found.path == tmp_path / pattern
    assert FramePattern.parse(found.path) == found
    numbered = [name for name in names if name not in ("readme.txt", "cover.png")]
    assert [found.name(one.number) for one in found.files()] == numbered


def test_a_folder_without_one_sequence(tmp_path):
    (tmp_path / "cover.png").touch()
    (tmp_path / ".001.png").touch()
    assert FramePattern.in_folder(tmp_path) is None
    (tmp_path / "7.png").touch()
    (tmp_path / "08.png").touch()
    with pytest.raises(VideoError, match=r"7\.png|08\.png"):
        FramePattern.in_folder(tmp_path)
    (tmp_path / "08.png").unlink()
    (tmp_path / "left7.png").touch()
    with pytest.raises(VideoError, match="2 sequences"):
        FramePattern.in_folder(tmp_path)


def test_frames_have_the_samples_of_their_files(tmp_path):
    values = np.random.default_rng(3).integers(0, 1 << 16, (3, 3, 5, 7), np.uint16)
    for number, planes in enumerate(values, 9):
        write_frame(tmp_path / f"{number:03}.tif", list(planes))
    pattern = FramePattern.in_folder(tmp_path)
    assert pattern is not None
    facts = part(pattern, "24000/1001")
    assert (facts.format.name, facts.frames, facts.has_times) == ("gbrp16le", 3, True)
    assert facts.time_base == Fraction(1001, 24000)
    assert facts.numbers.tolist() == [9, 10, 11] and facts.stamps.tolist() == [0, 1, 2]
    read = list(FrameSequenceReader(facts, 1, 3))
    assert [one.index for one in read] == [1, 2]
    for one in read:
        assert all((a == b).all() for a, b in zip(one.planes, values[one.index], strict=True))


def test_what_changes_within_a_sequence_is_named(tmp_path):
    images(tmp_path / "gap", "1.png", "2.png", "5.png")
    images(tmp_path / "size", "1.png", "2.png")
    images(tmp_path / "size", "3.png", size=(6, 5))
    images(tmp_path / "gray", "1.png")
    images(tmp_path / "gray", "2.png", mode="L")
    images(tmp_path / "bits", "1.png")
    write_frame(tmp_path / "bits" / "2.png", list(np.zeros((3, 5, 7), np.uint16)))
    images(tmp_path / "damaged", "1.png", "2.png")
    (tmp_path / "damaged" / "2.png").write_bytes(b"no image")
    for name, text, hint in (
        ("gap", r"3\.png: this frame is missing, between 2\.png and 5\.png", "--frames 1:3"),
        ("size", r"3\.png: 6×5 gbrp, and not 7×5 gbrp as 1\.png", "--frames 1:3"),
        ("gray", r"2\.png: 7×5 gray, and not 7×5 gbrp", "--frames 1:2"),
        ("bits", r"2\.png: 7×5 gbrp16le, and not 7×5 gbrp", "--frames 1:2"),
        ("damaged", r"2\.png: damaged", "--damaged keep"),
    ):
        pattern = FramePattern.in_folder(tmp_path / name)
        assert pattern is not None
        with pytest.raises(VideoError, match=text) as caught:
            part(pattern)
        assert caught.value.hint is not None and hint in caught.value.hint


def test_samples_that_videos_do_not_have(tmp_path):
    images(tmp_path / "alpha", "1.png", mode="RGBA")
    pattern = FramePattern.in_folder(tmp_path / "alpha")
    assert pattern is not None
    with pytest.raises(VideoError, match=r"1\.png: it has transparency"):
        part(pattern)
    images(tmp_path / "alpha", "0.png")
    with pytest.raises(VideoError, match=r"1\.png: it has transparency"):
        sequence_part(inspect_sequence(pattern, None), 0, 2, keep_damaged=True)
    (tmp_path / "float").mkdir()
    Image.fromarray(np.zeros((4, 4), np.float32), "F").save(tmp_path / "float" / "1.tif")
    pattern = FramePattern.in_folder(tmp_path / "float")
    assert pattern is not None
    with pytest.raises(VideoError, match="float32"):
        part(pattern)


@pytest.mark.parametrize("fps", ["0", "-3", "fast", "1/0", 1e9, float("nan")])
def test_rates_that_are_none(tmp_path, fps):
    images(tmp_path, "1.png")
    pattern = FramePattern.in_folder(tmp_path)
    assert pattern is not None
    with pytest.raises(UsageError, match="--fps"):
        inspect_sequence(pattern, fps)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270, -90])
def test_frames_are_turned_by_their_matrix(rotation, mirrored):
    plane = np.arange(15).reshape(3, 5)
    a, b, _, c, d, *_ = (round(one / (1 << 16)) for one in display_matrix(rotation, mirrored))
    places = {
        (b * x + d * y, a * x + c * y): plane[y, x] for y in range(3) for x in range(5)
    }  # row and column, from any origin
    rows, columns = (sorted({place[axis] for place in places}) for axis in (0, 1))
    due = [[places[row, column] for column in columns] for row in rows]
    assert upright_planes([plane], rotation, mirrored)[0].tolist() == due
    if not mirrored:
        assert (
            upright_planes([plane], rotation, False)[0] == np.rot90(plane, rotation // 90)
        ).all()
