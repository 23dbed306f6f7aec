"""Pixel formats: which are taken, how their samples lie, and what untagged files are read as."""

from __future__ import annotations

import av
import numpy as np
import pytest

from lowtide import VideoError
from lowtide.media.video.picture_format import (
    ColorTags,
    PictureFormat,
    frame_from_planes,
    frame_planes,
    picture_format_of,
)

NAMES = (
    "yuv420p yuv420p9le yuv422p10be yuv440p12le yuv444p16le yuvj420p gray gray12le gray16be gbrp"
    " gbrp14le rgb24 bgr24 bgr0 0rgb rgb0 rgb48le bgr48be"
    " uyvy422 yuyv422 yvyu422"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_samples_go_into_frames_and_back(name):
    for width, height in ((13, 9), (64, 48), (1, 1)):
        format = PictureFormat(width, height, name, ColorTags(9, 16, 9, False), 3)
        generator = np.random.default_rng(0)
        planes = [
            generator.integers(0, 1 << format.bits, shape).astype(format.plane_dtype)
            for shape in format.plane_shapes
        ]
        frame = frame_from_planes(planes, format)
        assert (frame.width, frame.height, frame.format.name) == (width, height, name)
        for found, plane in zip(frame_planes(frame, format), planes, strict=True):
            assert found.dtype == plane.dtype
            assert np.array_equal(found, plane)
        found = picture_format_of(frame, 3)
        assert (found.tags.primaries, found.tags.transfer, found.tags.matrix) == (9, 16, 9)
        assert found.full_range_used == format.full_range_used


def test_channels_lie_where_ffmpeg_has_them():
    for name in "rgb24 bgr24 bgr0 0rgb rgb0 gbrp".split():
        format = PictureFormat(2, 2, name)
        planes = [np.full((2, 2), value, np.uint8) for value in (10, 20, 30)]
        assert frame_from_planes(planes, format).to_ndarray(format="rgb24")[0, 0].tolist() == [
            10,
            20,
            30,
        ]


def test_every_format_is_converted_or_refused_with_a_way_out():
    taken = set()
    for name in sorted(av.video.format.names):
        try:
            format = PictureFormat(64, 64, name)
        except VideoError as error:
            assert name in str(error)
            continue
        taken.add(name)
        parts = av.VideoFormat(name, 64, 64).components
        assert {part.bits for part in parts} == {format.bits}
        assert [(part.height, part.width) for part in parts] == format.plane_shapes
        assert not any(part.is_alpha for part in parts)
    assert set(NAMES) <= taken
    assert len(taken) > 60
    for name, words, way in (
        ("yuva420p", "with transparency", "-pix_fmt yuv444p "),
        ("rgba64le", "with transparency", "-pix_fmt gbrp16le"),
        ("pal8", "cannot be converted", "-pix_fmt bgr0"),
        ("yuv411p", r"\(4:1:1: chroma of one in 4 pixels\)", "-pix_fmt yuv444p "),
        ("uyyvyy411", r"\(4:1:1", "-pix_fmt yuv444p "),
        ("yuv410p", r"\(4:1:0: chroma of one in 16 pixels\)", "-pix_fmt yuv444p "),
        ("xyz12le", "cannot be converted", "-pix_fmt yuv444p16le"),
    ):
        with pytest.raises(VideoError, match=words) as caught:
            PictureFormat(64, 64, name)
        assert way in (caught.value.hint or "")


def test_matrices_that_are_not_linear_are_refused():
    for matrix, name in ((0, "RGB"), (8, "YCgCo"), (10, "constant luminance"), (99, "number 99")):
        with pytest.raises(VideoError, match=name) as caught:
            PictureFormat(64, 64, "yuv420p", ColorTags(matrix=matrix))
        assert "zscale=matrix=709" in (caught.value.hint or "")
    assert PictureFormat(64, 64, "gbrp", ColorTags(matrix=0)).notes() == []


def test_untagged_pictures_are_read_by_their_lines():
    """Report REAL-Video-Enhancer 240: missing tags were an error."""
    small, large = PictureFormat(1280, 719, "yuv420p"), PictureFormat(1280, 720, "yuv420p")
    assert (small.matrix_used, large.matrix_used) == (6, 1)
    assert small.notes() == [
        "no color matrix is tagged: BT.601 is used (719 lines)",
        "no range is tagged: limited range is used",
    ]
    assert not small.full_range_used
    assert PictureFormat(64, 64, "yuvj420p").full_range_used
    assert PictureFormat(64, 64, "gray").full_range_used
    assert PictureFormat(64, 64, "rgb24", ColorTags(full_range=False)).full_range_used
    assert PictureFormat(64, 64, "yuv420p", ColorTags(1, 1, 1, False)).notes() == []


def test_a_matrix_that_players_would_change_is_tagged():
    small = PictureFormat(640, 480, "yuv420p")
    assert small.resized(1280, 960).tags == ColorTags(matrix=6)
    assert small.resized(1280, 960).matrix_used == small.matrix_used
    assert small.resized(800, 600).tags == ColorTags()
    tagged = PictureFormat(640, 480, "yuv420p", ColorTags(5, 6, 5, False), 2)
    enlarged = tagged.resized(1280, 960)
    assert (enlarged.tags, enlarged.chroma_location) == (tagged.tags, 2)
    assert (enlarged.width, enlarged.height, enlarged.name) == (1280, 960, "yuv420p")
