"""Segments of any length join to one file of the same frames and times."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest

from lowtide import OutputError
from lowtide.media.video.mux import JoinedFile, join_segments, verify_output_frames
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.packet_times import SampleClock, StreamTally, frame_rate
from lowtide.media.video.picture_format import ColorTags
from lowtide.media.video.video_encoder import decoding_stamps
from support.video_clips import Clip, Sound
from support.video_joins import NAMES, Contents, decode, encode_segments, enlarge

BASE = Fraction(1, 90_000)
# Gaps from a third of a millisecond to half a second, as screen recorders and phones make them.
UNEVEN = [0, 30, 60, 3_003, 6_006, 6_096, 51_096, 54_096, 54_126, 54_156, 60_000]


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    clip = Clip(frames=len(UNEVEN), stamps=UNEVEN, time_base=BASE)
    return decode(clip.write(tmp_path_factory.mktemp("clip") / "in.mp4"))


@pytest.mark.parametrize(
    ("codec", "ending", "pix_fmt"),
    [
        ("x264", ".mp4", "yuv444p"),
        ("x264", ".mov", "yuv420p"),
        ("x265", ".mp4", "yuv420p10le"),
        ("x265", ".mkv", "yuv422p10le"),
        ("svtav1", ".webm", "yuv420p10le"),
        ("svtav1", ".mp4", "yuv420p"),
        ("prores", ".mov", "yuv422p10le"),
        ("prores", ".mkv", "yuv422p10le"),
        ("ffv1", ".mkv", "gray16le"),
        ("ffv1", ".mp4", "yuv420p"),
    ],
)
def test_every_codec_keeps_its_frames_and_uneven_times(frames, tmp_path, codec, ending, pix_fmt):
    """Reports video2x 1488 and 485: drift, and double speed, by a rate for all frames."""
    target = tmp_path / f"out{ending}"
    joined = join_segments(
        plan_streams(None, target, codec=NAMES[codec]),
        encode_segments(frames, tmp_path / "work", step=4, codec=codec, pix_fmt=pix_fmt),
        target,
        stamps=np.array(UNEVEN),
        time_base=BASE,
    )
    verify_output_frames(joined)
    found = decode(target)
    assert found[0].format.name == pix_fmt
    late = [abs(f.pts * f.time_base - at * BASE) for f, at in zip(found, UNEVEN, strict=True)]
    assert max(late) <= (0 if ending in (".mp4", ".mov") else Fraction(1, 2000))


@pytest.mark.parametrize(
    ("codec", "ending"), [("x264", "mkv"), ("x265", "mp4"), ("x265", "mkv"), ("prores", "mov")]
)
def test_the_output_has_the_colors_and_pixels_of_the_segments(frames, tmp_path, codec, ending):
    """Report REAL-Video-Enhancer 36: colors washed out, as their tags were lost."""
    target = tmp_path / f"out.{ending}"
    paths = encode_segments(
        frames[:3],
        tmp_path / "work",
        codec=codec,
        pix_fmt="yuv422p10le",
        tags=ColorTags(9, 16, 9, False),
        pixel_aspect=Fraction(4, 3),
    )
    join_segments(
        plan_streams(None, target, codec=NAMES[codec]),
        paths,
        target,
        stamps=np.array(UNEVEN[:3]),
        time_base=BASE,
        pixel_aspect=Fraction(4, 3),
    )
    frame = decode(target)[0]
    tags = frame.color_primaries, frame.color_trc, frame.colorspace, frame.color_range
    assert [int(tag) for tag in tags] == [9, 16, 9, 1]
    with av.open(str(target)) as opened:
        assert opened.streams.video[0].sample_aspect_ratio == Fraction(4, 3)
        if codec == "x265":  # what Apple's players know
            assert (opened.streams.video[0].codec_context.codec_tag == "hvc1") == (ending == "mp4")


def test_segments_of_other_settings_are_refused(frames, tmp_path):
    one = encode_segments(frames[:3], tmp_path / "one")
    other = encode_segments(frames[:3], tmp_path / "two", pix_fmt="yuv444p")
    target = tmp_path / "out.mp4"
    with pytest.raises(OutputError, match="encoded with different settings"):
        join_segments(
            plan_streams(None, target, codec="h264"),
            one + other,
            target,
            stamps=np.arange(6),
            time_base=BASE,
        )


@pytest.mark.parametrize("step", [1, 2, 3, 11, 50])
def test_segments_of_any_length_give_the_same_times(frames, tmp_path, step):
    """Report Waifu2x-Extension-GUI 617: segments made the picture longer than its sound."""
    target = tmp_path / "out.mp4"
    paths = encode_segments(frames, tmp_path / "work", step=step)
    plan = plan_streams(None, target, codec="h264")
    verify_output_frames(
        join_segments(plan, paths, target, stamps=np.array(UNEVEN), time_base=BASE)
    )
    assert Contents(target).frames == [at * BASE for at in UNEVEN]


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_one_frame_is_a_film(tmp_path, ending):
    source = Clip(frames=1, sounds=(Sound(seconds=0.5, codec="libopus"),)).write(
        tmp_path / "in.mkv"
    )
    _, joined = enlarge(source, tmp_path / f"out.{ending}")
    verify_output_frames(joined)
    before, after = Contents(source), Contents(joined.path)
    assert after.frames == before.frames == [0]
    assert [p[0] for p in after.sounds[0]] == [p[0] for p in before.sounds[0]]


@pytest.mark.parametrize("ending", ["mkv", "mp4"])
def test_joining_twice_gives_the_same_packets(frames, tmp_path, ending):
    files = []
    for name in ("one", "two"):
        target = tmp_path / f"{name}.{ending}"
        paths = encode_segments(frames, tmp_path / name, step=4)
        plan = plan_streams(None, target, codec="h264")
        join_segments(plan, paths, target, stamps=np.array(UNEVEN), time_base=BASE)
        files.append(target)
    assert packets(files[0]) == packets(files[1])


def packets(path):
    with av.open(str(path)) as opened:
        return [(p.pts, p.dts, bytes(p)) for p in opened.demux(video=0)]


def test_a_missing_frame_is_an_error_and_leaves_no_file(frames, tmp_path):
    target = tmp_path / "out.mp4"
    paths = encode_segments(frames, tmp_path / "work", step=4)
    with pytest.raises(OutputError, match="11 frames were due, and 8 are in"):
        join_segments(
            plan_streams(None, target, codec="h264"),
            paths[:2],
            target,
            stamps=np.array(UNEVEN),
            time_base=BASE,
        )
    assert not target.exists()


def test_reading_again_finds_what_is_missing_or_elsewhere(tmp_path):
    source = Clip(frames=8, sounds=(Sound(),)).write(tmp_path / "in.mp4")
    _, good = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(good)

    def changed(**values):
        return JoinedFile(**(vars(good) | values))

    with pytest.raises(OutputError, match="9 frames were written, and 8 with a time"):
        verify_output_frames(changed(stamps=np.append(good.stamps, 10_000)))
    with pytest.raises(OutputError, match=r"frame 3 was due at 0\.120156 s"):
        verify_output_frames(changed(stamps=good.stamps + 2 * (np.arange(8) == 3)))
    with pytest.raises(OutputError, match="2 audio streams were written, 1 read again"):
        verify_output_frames(changed(streams=good.streams * 2))
    short = StreamTally("audio", begin=good.streams[0].begin, packets=47, size=1)
    with pytest.raises(OutputError, match="1 bytes were written"):
        verify_output_frames(changed(streams=(short,)))
    late = StreamTally("audio", begin=Fraction(1, 2), packets=48, size=good.streams[0].size)
    with pytest.raises(OutputError, match=r"was due at 0\.500000 s"):
        verify_output_frames(changed(streams=(late,)))
    half = tmp_path / "half.mkv"
    _, whole = enlarge(source, half)
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 3])
    with pytest.raises(OutputError, match="frames were written, and"):
        verify_output_frames(whole)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_decoding_stamps_rise_and_lie_before_their_frames(delay):
    stamps = np.array(UNEVEN)
    decoding = decoding_stamps(stamps, delay)
    assert (np.diff(decoding) > 0).all()
    assert (decoding <= stamps).all()
    assert len(decoding_stamps(stamps[:1], delay)) == 1


def test_the_rate_is_stated_only_where_frames_keep_it():
    film = np.round(np.arange(100) * 1001 / 24).astype(int)  # milliseconds, as Matroska rounds
    ms, stated = Fraction(1, 1000), Fraction(24_000, 1001)
    assert frame_rate(film, ms, stated) == stated
    assert frame_rate(np.arange(9) * 512, Fraction(1, 12_800), Fraction(2560, 121)) == 25
    assert frame_rate(np.array(UNEVEN), BASE, Fraction(30)) == 0
    assert frame_rate(np.array([5]), BASE, Fraction(30)) == 0


def packet(pts, base=Fraction(1, 1000), dts=None):
    made = av.Packet(b"sound")
    made.pts, made.dts, made.time_base = pts, pts if dts is None else dts, base
    return made


def test_sound_rounded_to_milliseconds_gets_whole_frames_again():
    clock, stamps = SampleClock(48_000, 1024), []
    for frame in (*range(40), *range(100, 120)):  # a pause after 40 frames
        one = packet(round(frame * 1024 / 48))
        clock.set(one)
        stamps.append(one.pts * one.time_base * 48_000)
    gaps = np.diff(np.array(stamps, float))
    assert (np.delete(gaps, 39) == 1024).all()
    assert abs(stamps[40] - 100 * 1024) <= 48


def test_stamps_that_go_back_in_time_are_moved_up():
    written = StreamTally("audio")
    found = []
    for at in (0, 20, 15, 16, 60):
        one = packet(at)
        written.require_rising(one)
        found.append(one.dts)
    assert found == [0, 20, 21, 22, 60]
    assert written.corrected == 2


FULL = """
import resource, sys
from pathlib import Path
import av, numpy as np
from fractions import Fraction
from lowtide import OutputError
from lowtide.media.video.mux import join_segments
from lowtide.media.video.other_streams import plan_streams
source, segment, target = map(Path, sys.argv[1:])
plan = plan_streams(source, target, codec="h264")
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    join_segments(plan, [segment], target, stamps=np.arange(20) * 512, time_base=Fraction(1, 12800))
except OutputError as error:
    print(target.exists(), error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the file size are Unix's")
@pytest.mark.parametrize("ending", ["mkv", "mp4"])
def test_a_full_disk_is_said_and_leaves_no_file(tmp_path, ending):
    source = Clip(sounds=(Sound(),)).write(tmp_path / "in.mp4")
    (segment,) = encode_segments(decode(source), tmp_path / "work", step=20)
    target = tmp_path / f"out.{ending}"
    command = [sys.executable, "-c", FULL, source, segment, target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False ")
    assert "the disk is full" in done.stdout
