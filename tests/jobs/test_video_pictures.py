"""Videos whose files say more of their pictures than samples: what is kept, obeyed or refused."""

import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import Cancelled, UsageError, VideoError  # noqa: E402
from support.stored_pictures import (  # noqa: E402
    BRIGHT,
    DARK,
    FIELDS,
    clean_mp4,
    combed,
    cropped_h264,
    cropped_mkv,
    framed,
    gif,
    packed,
    see_through,
)
from support.video_clips import Clip  # noqa: E402


def pictures(path: Path) -> list[np.ndarray]:
    """All frames as rows of RGB."""
    with av.open(str(path)) as container:
        return [one.to_ndarray(format="rgb24") for one in container.decode(video=0)]


def luma(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [one.reformat(format="gray").to_ndarray() for one in container.decode(video=0)]


def stamps(path: Path) -> list[Fraction]:
    with av.open(str(path)) as container:
        return [one.pts * one.time_base for one in container.decode(video=0)]


def pixel_format(path: Path) -> str:
    with av.open(str(path)) as container:
        return next(container.decode(video=0)).format.name


SIDES = {"left": 8, "right": 2, "top": 4, "bottom": 8}


def _header_crop(path: Path) -> Path:
    whole = Clip(frames=3, drawn=framed(**SIDES)).write(path.with_name("whole.mp4"))
    return cropped_h264(path, whole, **SIDES)


# Files that crop frames of 64×48, and the size that is left.
CROPS = {
    "rows.mkv": (
        lambda path: cropped_mkv(path, ("top", 4), ("bottom", 8), drawn=framed(0, 0, 4, 8)),
        (64, 36),
    ),
    "columns.mkv": (
        lambda path: cropped_mkv(path, ("left", 6), ("right", 10), drawn=framed(6, 10)),
        (48, 48),
    ),
    "corner.mkv": (
        lambda path: cropped_mkv(path, ("left", 6), ("top", 2), drawn=framed(6, 0, 2, 0)),
        (58, 46),
    ),
    "clap.mp4": (
        lambda path: clean_mp4(path, 52, 40, -2, 2, drawn=framed(4, 8, 6, 2)),
        (52, 40),
    ),
    "header.mp4": (_header_crop, (54, 36)),
}


@pytest.mark.parametrize("name", CROPS)
def test_what_a_file_crops_is_not_shown(tmp_path, name):
    make, (width, height) = CROPS[name]
    source = make(tmp_path / name)
    target = tmp_path / f"out{source.suffix}"
    item = lowtide.video(source, target).videos[0]
    for frame in pictures(target):
        assert frame.shape == (2 * height, 2 * width, 3)
        assert frame.max() < (DARK + BRIGHT) / 2  # nothing of what was outside
    assert any("crops" in note for note in item.notes) == (name != "header.mp4")
    planned = lowtide.video(source, target, dry_run=True, force=True).videos[0]
    assert (planned.out_width, planned.out_height) == (2 * width, 2 * height)


def test_a_crop_between_samples_of_chroma_is_refused_by_name(tmp_path):
    source = cropped_mkv(tmp_path / "in.mkv", ("top", 3), ("bottom", 8))
    with pytest.raises(VideoError, match="crops 3 above, 8 below of frames of yuv420p") as caught:
        lowtide.video(source, tmp_path / "out.mkv")
    assert "crop=64:37:0:3" in caught.value.hint
    deep = cropped_mkv(tmp_path / "444.mkv", ("top", 3), ("left", 1), pix_fmt="yuv444p")
    assert lowtide.video(deep, tmp_path / "out.mkv").videos[0].width == 63


TRANSPARENT = [
    ("in.webm", "libvpx-vp9", "yuva420p"),
    ("in.mkv", "libvpx-vp9", "yuva420p"),
    ("in.mov", "prores_ks", "yuva444p10le"),
    ("in.mov", "qtrle", "argb"),
    ("in.mov", "png", "rgba"),
    ("in.mkv", "ffv1", "bgra"),
    ("in.mkv", "ffv1", "gbrap12le"),
]


@pytest.mark.parametrize(("name", "codec", "pix_fmt"), TRANSPARENT)
def test_transparency_is_refused_with_its_first_frame_and_opaque_frames_are_read(
    tmp_path, name, codec, pix_fmt
):
    shape = {"frames": 4, "codec": codec, "pix_fmt": pix_fmt}
    options = {"lossless": "1"} if codec.startswith("libvpx") else {}
    source = Clip(**shape, options=options, drawn=see_through(255, 255, 0)).write(tmp_path / name)
    target = tmp_path / "out.mkv"
    with pytest.raises(VideoError, match="with transparency, which cannot be kept: frame 2"):
        lowtide.video(source, target)
    assert lowtide.video(source, target, frames=":2").videos[0].frames_out == 2
    source = Clip(**shape, options=options, drawn=see_through()).write(tmp_path / name)
    item = lowtide.video(source, target, force=True).videos[0]
    assert item.frames_out == 4
    assert np.abs(pictures(target)[0].mean((0, 1)) - (90, 120, 40)).max() < 4
    with av.open(str(target)) as made:
        assert not {"alpha_mode", "encoder"} & {key.lower() for key in made.streams[0].metadata}


def test_an_opaque_gif_is_read_and_the_first_frame_that_is_not_is_named(tmp_path):
    target = tmp_path / "out.mp4"
    item = lowtide.video(gif(tmp_path / "in.gif", False, False, False), target).videos[0]
    assert (item.frames_out, item.pixel_format) == (3, "yuv420p")
    assert stamps(target) == [0, Fraction(2, 25), Fraction(4, 25)]
    with pytest.raises(VideoError, match=r"bgra, with transparency.* frame 1, at 0\.08 s"):
        lowtide.video(gif(tmp_path / "in.gif", False, True, False), target, force=True)


@pytest.mark.parametrize("name", "uyvy422 yuyv422 yvyu422".split())
def test_packed_samples_are_those_of_planes(tmp_path, name):
    source, made = tmp_path / "in.nut", []
    for pix_fmt in (name, "yuv422p"):
        clip = Clip(frames=2, codec="rawvideo", pix_fmt=pix_fmt, drawn=packed(pix_fmt))
        target = tmp_path / f"{pix_fmt}.mkv"
        item = lowtide.video(clip.write(source), target, codec="ffv1").videos[0]
        assert item.pixel_format == "yuv422p"
        made.append(pictures(target))
    assert np.array_equal(*made)


def _animated_webp(path: Path) -> Path:
    frames = [Image.new("RGB", (48, 32), (80 * place, 90, 40)) for place in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80)
    return path


@pytest.mark.parametrize(
    ("make", "text", "way"),
    [
        (
            lambda path: Clip(frames=2, codec="ffv1", pix_fmt="yuv411p").write(path),
            r"yuv411p \(4:1:1",
            "-pix_fmt yuv444p",
        ),
        (
            lambda path: Clip(frames=2, codec="ffv1", pix_fmt="yuv410p").write(path),
            r"yuv410p \(4:1:0",
            "-pix_fmt yuv444p",
        ),
        (
            lambda path: Clip(frames=2, codec="apng", pix_fmt="rgb24", drawn=framed()).write(
                path.with_suffix(".apng")
            ),
            "an animated PNG",
            "ffmpeg -i",
        ),
        (lambda path: _animated_webp(path.with_suffix(".webp")), "an animated WebP", "--fps"),
    ],
    ids="411 410 apng webp".split(),
)
def test_what_is_not_read_is_refused_with_what_it_is(tmp_path, make, text, way):
    with pytest.raises(VideoError, match=text) as caught:
        lowtide.video(make(tmp_path / "in.mkv"), tmp_path / "out.mkv")
    assert way in caught.value.hint


def comb(frame: np.ndarray) -> float:
    """How much rows differ from those above and below."""
    rows = frame.astype(float)
    return np.abs(rows[1:-1] - (rows[:-2] + rows[2:]) / 2).mean()


def test_interlaced_frames_are_made_whole_where_that_is_asked_for(tmp_path):
    source = Clip(frames=6, options=FIELDS, drawn=combed).write(tmp_path / "in.mkv")
    target = tmp_path / "out.mkv"
    with pytest.raises(VideoError, match="interlaced") as caught:
        lowtide.video(source, target)
    assert caught.value.hint.startswith("--deinterlace")
    options = {"deinterlace": True, "codec": "ffv1", "scale": 1}
    item = lowtide.video(source, target, segment=2, **options).videos[0]
    assert any(
        "interlaced frames are made whole, one of each: number, times and rate stay" in note
        for note in item.notes
    )
    assert stamps(target) == stamps(source)
    whole = luma(target)
    assert max(map(comb, whole)) < comb(luma(source)[0]) / 4
    for name, more in (("one", {"segment": 120}), ("part", {"frames": "3:"})):
        other = tmp_path / f"{name}.mkv"
        lowtide.video(source, other, **options, **more)
        assert np.array_equal(luma(other), whole[3:] if name == "part" else whole)


def test_half_pictures_that_are_frames_are_refused_with_a_command(tmp_path):
    options = {"x265-params": "interlace=tff:log-level=none"}
    source = Clip(frames=4, codec="libx265", options=options).write(tmp_path / "in.mkv")
    for deinterlace in (False, True):
        with pytest.raises(VideoError, match=r"each frame of this H\.265 is a half") as caught:
            lowtide.video(source, tmp_path / "out.mkv", deinterlace=deinterlace)
        assert "-vf weave,bwdif" in caught.value.hint


def test_a_stopped_run_makes_interlaced_frames_whole_as_a_calm_one(tmp_path):
    source = Clip(frames=12, options=FIELDS, drawn=combed).write(tmp_path / "in.mkv")
    stop, options = threading.Event(), {"segment": 3, "deinterlace": True}

    def watch(event):
        if event.unit == "frames" and event.done == 5:
            stop.set()

    target, calm = tmp_path / "out.mkv", tmp_path / "calm.mkv"
    with pytest.raises(Cancelled):
        lowtide.video(source, target, progress=watch, cancel=stop, **options)
    assert lowtide.video(source, target, **options).videos[0].frames_resumed > 0
    lowtide.video(source, calm, **options)
    assert np.array_equal(pictures(target), pictures(calm))


def test_digital_video_of_a_camera_is_read(tmp_path):
    shape = {"width": 720, "height": 576, "codec": "dvvideo", "frames": 2}
    stored = {"stamps": (0, 1), "time_base": Fraction(1, 25)}
    source = Clip(**shape, **stored, drawn=combed).write(tmp_path / "in.avi")
    target = tmp_path / "out.mkv"
    item = lowtide.video(source, target, deinterlace=True, scale=0.25).videos[0]
    assert (item.frames_out, item.out_width, item.out_height) == (2, 180, 144)


def test_whole_frames_stay_as_they_are_and_images_have_no_fields(tmp_path):
    source, made = Clip(frames=3).write(tmp_path / "in.mkv"), []
    for deinterlace in (False, True):
        target = tmp_path / f"{deinterlace}.mkv"
        item = lowtide.video(source, target, deinterlace=deinterlace).videos[0]
        made.append(pictures(target))
    assert any("not marked as interlaced" in note for note in item.notes)
    assert np.array_equal(*made)
    lowtide.video(source, tmp_path / "%d.png")
    with pytest.raises(UsageError, match="--deinterlace is for video files"):
        lowtide.video(tmp_path / "%d.png", tmp_path / "out.mkv", fps=25, deinterlace=True)


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"scale": 1.5}, (140, 92)),
        ({"scale": 1.7}, (160, 106)),  # of 159.8 and 105.4
        ({"scale": 1.3}, (122, 80)),
        ({"width": 100}, (100, 66)),
        ({"width": 97}, (96, 64)),
        ({"height": 63}, (96, 62)),
        ({"width": 101, "height": 63}, (100, 62)),
    ],
)
def test_odd_sizes_become_the_nearest_even_ones(tmp_path, asked, size):
    source = Clip(frames=1, width=94, height=62).write(tmp_path / "in.mp4")
    item = lowtide.video(source, tmp_path / "out.mp4", dry_run=True, **asked).videos[0]
    assert (item.out_width, item.out_height) == size
    exact = lowtide.video(source, tmp_path / "out.mkv", codec="ffv1", dry_run=True, **asked).videos[
        0
    ]
    said = any("no odd sizes" in note for note in item.notes)
    assert said == ((exact.out_width, exact.out_height) != size)


def test_sides_of_pixels_that_are_not_square_are_those_that_are_shown(tmp_path):
    shape = {"frames": 1, "width": 96, "height": 64, "pixel_aspect": Fraction(32, 27)}
    upright = Clip(**shape).write(tmp_path / "in.mp4")
    turned = Clip(**shape, rotation=90).write(tmp_path / "turned.mp4")

    def shown(source: Path, **asked: int) -> tuple[Fraction, int]:
        target = tmp_path / "out.mp4"
        lowtide.video(source, target, force=True, **asked)
        with av.open(str(target)) as made:
            stream = made.streams.video[0]
            width = stream.width * (stream.sample_aspect_ratio or 1)
            return (stream.height, width) if source is turned else (width, stream.height)

    assert shown(upright, width=198) == (198, 112)
    assert shown(upright, height=128) == (Fraction(192 * 32, 27), 128)
    assert shown(upright, width=200, height=100) == (200, 100)
    assert shown(upright, max_side=150)[0] == 150
    assert shown(upright) == (Fraction(192 * 32, 27), 128)  # a scale needs no other shape
    assert shown(turned, height=198) == (112, 198)


@pytest.mark.parametrize(
    ("pix_fmt", "name", "options", "made"),
    [
        ("bgr0", "out.mp4", {}, "yuv420p"),
        ("bgr0", "out.webm", {}, "yuv420p"),
        ("gbrp12le", "out.mp4", {}, "yuv420p10le"),
        ("bgr0", "out.mp4", {"codec": "x264"}, "yuv444p"),
        ("bgr0", "out.mkv", {"codec": "ffv1"}, "bgr0"),
        ("yuv444p", "out.mp4", {}, "yuv444p"),
    ],
)
def test_rgb_becomes_what_players_show_unless_a_codec_is_named(
    tmp_path, pix_fmt, name, options, made
):
    clip = Clip(frames=2, codec="ffv1", pix_fmt=pix_fmt, drawn=framed(8))
    source = clip.write(tmp_path / "in.mkv")
    item = lowtide.video(source, tmp_path / name, **options).videos[0]
    assert item.pixel_format == made
    said = any("which players show" in note for note in item.notes)
    assert said == (not options and pix_fmt != "yuv444p")
    before, after = pictures(source)[0], pictures(tmp_path / name)[0]
    assert np.abs(before.mean((0, 1)) - after.mean((0, 1))).max() < 4
