"""Encoders: what is written is read again, with its tags, and what cannot be is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from lowtide import OutputError, UsageError
from lowtide.media.video.encoder_settings import CODECS, VideoEncoderSettings, held_format
from lowtide.media.video.picture_format import (
    ColorTags,
    PictureFormat,
    frame_planes,
    picture_format_of,
)
from lowtide.media.video.side_data import Hdr10Light, light_of
from lowtide.media.video.video_encoder import VideoSegmentEncoder
from lowtide.media.video.video_facts import chroma_location

TICK = Fraction(1, 90_000)
STAMPS = (0, 3000, 6750, 12_750, 15_750)  # not evenly
SUFFIXES = {"x264": ".mp4", "x265": ".mp4", "svtav1": ".mp4", "prores": ".mov", "ffv1": ".mkv"}
LIGHT = Hdr10Light(
    (34_000, 16_000, 13_250, 34_500, 7_500, 3_000, 15_635, 16_450, 10_000_000, 1), (1000, 400)
)
HDR = ColorTags(9, 16, 9, False)


def pictures(format: PictureFormat, count: int = len(STAMPS)) -> list[list[np.ndarray]]:
    """Moving ramps."""
    top = 1 << format.bits
    return [
        [
            (
                (np.add.outer(np.arange(high), np.arange(wide)) + 5 * index) * top // 256 % top
            ).astype(format.plane_dtype)
            for high, wide in format.plane_shapes
        ]
        for index in range(count)
    ]


def encode(
    path: Path,
    settings: VideoEncoderSettings,
    format: PictureFormat,
    count: int = len(STAMPS),
    **options,
) -> list[list[np.ndarray]]:
    frames, last = pictures(format, count), STAMPS[-1]
    stamps = [*STAMPS, *range(last + 3600, last + 3600 * count, 3600)][:count]
    encoder = VideoSegmentEncoder(path, settings, format, time_base=TICK, **options)
    for planes, stamp in zip(frames, stamps, strict=True):
        encoder.write(planes, stamp)
    encoder.close()
    return frames


def decode(path: Path) -> list[av.VideoFrame]:
    with av.open(str(path)) as container:
        return list(container.decode(video=0))


def packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(video=0)]


def location(path: Path) -> int:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        packet = next(container.demux(stream))
        found = chroma_location(stream, packet)
        assert packet.size > 0  # still there for the decoder
        return found


_ENCODE = """
import sys
from pathlib import Path
from lowtide.media.video.encoder_settings import VideoEncoderSettings, held_format
from lowtide.media.video.picture_format import PictureFormat
import test_video_encoder

settings = VideoEncoderSettings(sys.argv[2])
format, _ = held_format(settings, PictureFormat(192, 128, "yuv420p"))
test_video_encoder.encode(Path(sys.argv[1]), settings, format, count=12)
"""


@pytest.mark.parametrize("codec", CODECS)
def test_packets_do_not_depend_on_what_was_in_memory(codec, tmp_path):
    made = []
    for byte in ("0", "85", "170"):  # which glibc writes into what it allocates
        path = tmp_path / f"{byte}{SUFFIXES[codec]}"
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = os.environ | {"MALLOC_PERTURB_": byte, "PYTHONPATH": paths}
        command = [sys.executable, "-c", _ENCODE, str(path), codec]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        made.append(packets(path))
    assert len(made[0]) > 10 and made[0] == made[1] == made[2]


@pytest.mark.parametrize("codec", CODECS)
def test_frames_come_back_with_their_stamps_and_tags(codec, tmp_path):
    """Reports video2x 1488 and REAL-Video-Enhancer 36: evened stamps, washed-out HDR."""
    settings, path = VideoEncoderSettings(codec), tmp_path / f"clip{SUFFIXES[codec]}"
    source = PictureFormat(64, 48, "yuv420p10le", HDR, 3)
    format, notes = held_format(settings, source, LIGHT)
    lost = [f"{codec} has no place for the light levels of HDR10: left out"]
    assert notes[-1:] == (lost if codec in ("prores", "ffv1") else [])
    written = encode(
        path,
        settings,
        format,
        pixel_aspect=Fraction(4, 3),
        light=LIGHT,
        frame_rate=Fraction(10**12 + 1, 10**11),
    )
    frames = decode(path)
    unit = Fraction(1, 1000) if path.suffix == ".mkv" else TICK
    assert [round(frame.pts * frame.time_base / unit) for frame in frames] == [
        round(stamp * TICK / unit) for stamp in STAMPS
    ]
    for frame, planes in zip(frames, written, strict=True):
        found = picture_format_of(frame)
        assert (found.name, found.tags) == (format.name, HDR)
        for plane, other in zip(frame_planes(frame, format), planes, strict=True):
            difference = np.abs(plane.astype(int) - other)
            assert np.median(difference) <= (0 if codec == "ffv1" else 24)
    if path.suffix != ".mkv":  # which keeps it for a whole file only
        with av.open(str(path)) as container:
            assert container.streams.video[0].sample_aspect_ratio == Fraction(4, 3)
    if codec in ("x264", "x265", "svtav1"):
        assert light_of(frames[0]) == LIGHT
        assert location(path) == 3


@pytest.mark.parametrize("codec", CODECS)
def test_untagged_frames_stay_untagged(codec, tmp_path):
    settings, path = VideoEncoderSettings(codec), tmp_path / f"clip{SUFFIXES[codec]}"
    format, _ = held_format(settings, PictureFormat(64, 48, "yuv420p"))
    encode(path, settings, format)
    first = decode(path)[0]
    tags = picture_format_of(first).tags
    assert (tags.primaries, tags.transfer, tags.matrix) == (2, 2, 2)
    assert not tags.full_range  # some encoders write limited, which is what untagged means
    assert light_of(first) is None
    assert location(path) == 0


@pytest.mark.parametrize("codec", ["x264", "x265", "svtav1", "ffv1"])
def test_full_range_is_tagged(codec, tmp_path):
    settings, path = VideoEncoderSettings(codec), tmp_path / f"clip{SUFFIXES[codec]}"
    format, notes = held_format(settings, PictureFormat(64, 48, "yuvj420p", ColorTags(5, 6, 5)))
    assert (format.name, format.full_range_used, notes) == ("yuv420p", True, [])
    encode(path, settings, format)
    assert picture_format_of(decode(path)[0]).tags == ColorTags(5, 6, 5, True)


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        *(("x264", name) for name in "yuv422p yuv444p10le".split()),
        *(("x265", name) for name in "yuv422p12le gbrp12le gray10le".split()),
        *(("prores", name) for name in "yuv422p10le".split()),
        *(("ffv1", name) for name in "yuv440p yuv444p16le gray16le bgr0 gbrp16le rgb48le".split()),
    ],
)
def test_every_kind_of_samples_is_held_as_it_is(codec, name, tmp_path):
    settings, path = VideoEncoderSettings(codec), tmp_path / f"clip{SUFFIXES[codec]}"
    format, notes = held_format(settings, PictureFormat(64, 48, name))
    assert (format.name, notes) == (name, [])
    written = encode(path, settings, format)
    frames = decode(path)
    shown = {"rgb48le": "gbrp16le"}.get(name, name)  # the same samples
    assert [frame.format.name for frame in frames] == [shown] * len(STAMPS)
    if codec == "ffv1":
        for frame, planes in zip(frames, written, strict=True):
            found = frame_planes(frame, picture_format_of(frame))
            assert all(np.array_equal(a, b) for a, b in zip(found, planes, strict=True))


def test_gray_keeps_its_range_where_it_is_read_as_color(tmp_path):
    format, _ = held_format(VideoEncoderSettings("x264"), PictureFormat(64, 48, "gray"))
    encode(tmp_path / "gray.mp4", VideoEncoderSettings("x264"), format)
    found = picture_format_of(decode(tmp_path / "gray.mp4")[0])
    assert found.kind == "yuv"  # as FFmpeg decodes gray H.264
    assert found.full_range_used


def test_the_nearest_format_is_named():
    def held(codec: str, name: str, preset: str | None = None) -> tuple[str, list[str]]:
        settings = VideoEncoderSettings(codec, preset=preset)
        format, notes = held_format(settings, PictureFormat(64, 48, name))
        return format.name, notes

    assert held("x264", "yuv420p12le") == (
        "yuv420p10le",
        ["x264 has no yuv420p12le: yuv420p10le is written"],
    )
    assert held("svtav1", "yuv444p")[0] == "yuv420p"
    assert held("x265", "yuv440p")[0] == "yuv444p"
    assert held("prores", "yuv420p")[0] == "yuv422p10le"
    assert held("prores", "yuv420p", "4444")[0] == "yuv444p10le"
    assert held("prores", "gbrp10le", "lt")[0] == "yuv422p10le"
    assert held("prores", "gray")[0] == "yuv422p10le"
    assert held("x265", "yuv444p16be")[0] == "yuv444p12le"
    assert held("ffv1", "rgb48be") == ("rgb48le", [])
    assert held("x265", "rgb24")[0] == "gbrp"


def test_rgb_becomes_luma_and_chroma_with_their_tags():
    source = PictureFormat(64, 48, "gbrp", ColorTags(1, 13, 0, None))
    format, notes = held_format(VideoEncoderSettings("x264"), source)
    assert format.tags == ColorTags(1, 13, 1, False)
    assert notes[1:] == ["RGB is converted to luma and chroma by BT.709"]


def test_what_a_codec_cannot_tag_is_converted():
    format, notes = held_format(VideoEncoderSettings("prores"), PictureFormat(8, 8, "yuvj444p"))
    assert format.tags.full_range is False
    assert "prores has no full range: limited range is written" in notes
    source = PictureFormat(8, 8, "yuv420p", chroma_location=2)
    format, notes = held_format(VideoEncoderSettings("svtav1"), source)
    assert (format.chroma_location, len(notes)) == (1, 1)


@pytest.mark.parametrize("width", [24, 48])
def test_pictures_that_x265_would_corrupt_memory_for_are_refused(width):
    with pytest.raises(UsageError, match="x265 holds pictures of 56 or more samples across"):
        held_format(VideoEncoderSettings("x265"), PictureFormat(width, 96, "yuv420p"))
    held_format(VideoEncoderSettings("x265"), PictureFormat(56, 32, "yuv420p"))


def test_settings_are_those_of_the_codec():
    for settings, words, hint in (
        (dict(codec="vp9"), "no video codec 'vp9'", "x264|x265|svtav1|prores|ffv1"),
        (dict(quality=52), "quality 52 of x264 is not in 0 \\(best\\) to 51", "--quality 18"),
        (dict(codec="svtav1", quality=0), "not in 1", "--quality"),
        (dict(codec="ffv1", quality=1), "ffv1 has no quality", "leave --quality out"),
        (dict(codec="ffv1", preset="fast"), "no preset", "leave it out"),
        (dict(codec="svtav1", preset="medium"), "no preset 'medium'", "--preset 0|1|2"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            VideoEncoderSettings(**settings)
        assert hint in (caught.value.hint or "")


def test_quality_and_preset_change_the_file(tmp_path):
    format, sizes = PictureFormat(64, 48, "yuv420p"), {}
    for codec, quality, preset in (
        ("x264", None, None),
        ("x264", 0, None),
        ("x264", 40, None),
        ("x264", None, "ultrafast"),
        ("svtav1", 20.25, "12"),
        ("svtav1", 63, "12"),
    ):
        path = tmp_path / "clip.mp4"
        encode(path, VideoEncoderSettings(codec, quality, preset), format)
        sizes[codec, quality, preset] = sum(map(len, packets(path)))
    assert len(set(sizes.values())) == len(sizes)
    assert sizes["x264", 0, None] > sizes["x264", None, None] > sizes["x264", 40, None]
    assert sizes["svtav1", 20.25, "12"] > sizes["svtav1", 63, "12"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_frames_make_the_same_packets(codec, tmp_path):
    settings = VideoEncoderSettings(codec)
    format, _ = held_format(settings, PictureFormat(128, 96, "yuv420p"))
    paths = [tmp_path / f"{name}{SUFFIXES[codec]}" for name in "ab"]
    for path in paths:
        encode(path, settings, format)
    assert packets(paths[0]) == packets(paths[1])


@pytest.mark.parametrize("codec", CODECS)
def test_odd_sizes_are_written_or_refused_beforehand(codec, tmp_path):
    for name, width, height in (
        ("yuv420p", 63, 47),
        ("yuv420p", 64, 47),
        ("yuv422p", 64, 47),
        ("yuv444p", 63, 47),
        ("yuv420p", 2, 2),
        ("yuv420p", 1, 1),
    ):
        settings, path = VideoEncoderSettings(codec), tmp_path / f"clip{SUFFIXES[codec]}"
        try:
            format, _ = held_format(settings, PictureFormat(width, height, name))
        except UsageError as error:
            assert codec in ("x264", "x265", "svtav1")
            assert "--codec ffv1" in (error.hint or "")
            continue
        assert codec not in ("x264", "x265") or name != "yuv420p" or (width, height) == (2, 2)
        encode(path, settings, format)
        frames = decode(path)
        assert [(frame.width, frame.height) for frame in frames] == [(width, height)] * 5


def test_a_full_disk_and_a_missing_folder_leave_nothing(tmp_path):
    format, settings = PictureFormat(640, 480, "yuv420p"), VideoEncoderSettings("ffv1")
    with pytest.raises(OutputError, match="clip"):
        encode(tmp_path / "missing" / "clip.mkv", settings, format)
    full = tmp_path / "clip.mkv"
    full.symlink_to("/dev/full")
    with pytest.raises(OutputError, match="space"):
        encode(full, settings, format)
    assert list(tmp_path.iterdir()) == []


def test_what_the_container_or_the_encoder_refuses_leaves_nothing(tmp_path):
    for path, codec, name in (
        (tmp_path / "clip.mov", "ffv1", "yuv420p"),  # a codec that QuickTime does not hold
        (tmp_path / "clip.mov", "svtav1", "yuv420p"),
        (tmp_path / "clip.mp4", "x264", "yuv420p12le"),  # a format that `held_format` changes
    ):
        with pytest.raises(OutputError, match=f"64×48 frames of {name} cannot be written"):
            encode(path, VideoEncoderSettings(codec), PictureFormat(64, 48, name))
    encoder = VideoSegmentEncoder(
        tmp_path / "clip.mkv",
        VideoEncoderSettings(),
        PictureFormat(64, 48, "yuv420p"),
        time_base=TICK,
    )
    encoder.write(pictures(PictureFormat(64, 48, "yuv420p"))[0], 0)
    encoder.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_lacks_memory_under_a_limit_says_what_to_raise(tmp_path):
    code = """
import resource, sys
from fractions import Fraction
from pathlib import Path
from lowtide import OutputError
from lowtide.media.video.encoder_settings import VideoEncoderSettings
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.video_encoder import VideoSegmentEncoder
load_av()
used = int(open("/proc/self/status").read().split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
format = PictureFormat(1920, 1080, "yuv420p")
try:
    settings = VideoEncoderSettings("x264")
    VideoSegmentEncoder(Path(sys.argv[1]), settings, format, time_base=Fraction(1, 25))
except OutputError as error:
    print(error.hint)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.mp4"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "raise the limit of this process" in run.stdout
    assert not list(tmp_path.iterdir())
