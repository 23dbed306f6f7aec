"""What a video file says of itself, and what is refused before any frame is run."""

import gc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import UsageError, VideoError  # noqa: E402
from lowtide.media.video.video_facts import frame_range, inspect_video  # noqa: E402
from lowtide.media.video.video_reader import VideoReader, video_part  # noqa: E402
from support.video_clips import Clip, Sound, full_mkv, picture_bytes, rotated_mp4  # noqa: E402


def luma_of(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray()[:48].copy() for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.ts", "clip.avi", "clip.mov"])
def test_every_frame_is_read_with_its_stamp_from_any_place(tmp_path, name):
    path = Clip(frames=30, options={"g": "12"}, time_base=Fraction(1, 25), width=64).write(
        tmp_path / name
    )
    expected = luma_of(path)
    facts = inspect_video(path)
    assert facts.frames == 30
    assert np.allclose(np.diff(facts.stamps) * float(facts.time_base), 0.04, atol=0.001)
    for first, last in ((0, 30), (17, 23), (29, 30)):
        found = list(VideoReader(facts, first, last))
        assert [one.index for one in found] == list(range(first, last))
        assert [one.pts for one in found] == facts.stamps[first:last].tolist()
        assert all((one.planes[0] == expected[one.index]).all() for one in found)


def test_frames_are_freed_without_the_garbage_collector(tmp_path):
    """It comes rarely, and frames are large."""
    path = Clip(frames=30, width=64).write(tmp_path / "clip.mp4")
    facts = inspect_video(path)
    gc.collect()
    gc.disable()
    try:
        assert sum(1 for _ in VideoReader(facts, 0, 30)) == 30
        assert gc.collect() < 30
    finally:
        gc.enable()


def test_uneven_frames_of_10_bits_keep_their_stamps(tmp_path):
    facts = inspect_video(full_mkv(tmp_path / "clip.mkv", frames=12))
    assert facts.stamps.tolist()[:6] == [0, 40, 70, 140, 160, 210]
    assert (facts.format.name, facts.format.bits, facts.codec) == ("yuv420p10le", 10, "hevc")
    assert facts.notes == ()


def test_a_turned_clip_and_one_with_a_cover(tmp_path):
    assert inspect_video(rotated_mp4(tmp_path / "turned.mp4")).rotation == 90
    cover = Clip(frames=3, cover=picture_bytes(), sounds=(Sound(),)).write(tmp_path / "cover.mp4")
    assert inspect_video(cover).frames == 3


def test_frames_that_an_edit_list_hides_are_not_counted(tmp_path):
    stamps = [one * 512 - 1024 for one in range(10)]
    path = Clip(frames=10, stamps=stamps).write(tmp_path / "hidden.mp4")
    facts = inspect_video(path)
    assert facts.frames == len(luma_of(path)) == 8
    assert "2 frames before the first one are hidden" in facts.notes[0]
    assert len(list(VideoReader(facts, 0, 8))) == 8


def test_a_frame_count_that_lies_is_not_believed(tmp_path):
    path = Clip(frames=30, time_base=Fraction(1, 25)).write(tmp_path / "clip.avi")
    data = bytearray(path.read_bytes())
    for name, place in ((b"avih", 24), (b"strh", 40)):  # the counts after name and size
        at = data.index(name) + place
        assert int.from_bytes(data[at : at + 4], "little") == 30
        data[at : at + 4] = (31).to_bytes(4, "little")
    path.write_bytes(data)
    assert inspect_video(path).frames == 30


def test_a_clip_that_begins_late_is_not_damaged(tmp_path):
    stamps = [2000 + 40 * place for place in range(25)]
    sounds = (Sound(start=2.5, seconds=2),)
    for name in ("late.mkv", "late.mp4", "late.ts"):
        clip = Clip(frames=25, stamps=stamps, time_base=Fraction(1, 1000), sounds=sounds)
        facts = inspect_video(clip.write(tmp_path / name))
        assert facts.frames == 25 and facts.damage is None
        assert facts.seconds(0) >= 2


def test_a_file_that_is_cut_short_is_refused_or_kept(tmp_path):
    path = Clip(frames=60, sounds=(Sound(seconds=2.4),)).write(tmp_path / "clip.mkv")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(VideoError, match=r"it ends after 1\.\d+ s, and its header says 2\.4"):
        inspect_video(path)
    kept = inspect_video(path, keep_damaged=True)
    assert 10 < kept.frames < 60
    assert len(list(VideoReader(kept, 0, kept.frames, keep_damaged=True))) == kept.frames


def test_damage_inside_is_named_with_its_time(tmp_path):
    path = Clip(frames=60, width=128, height=96).write(tmp_path / "clip.mp4")
    data, generator = bytearray(path.read_bytes()), np.random.default_rng(1)
    for place in generator.integers(len(data) // 3, len(data) * 2 // 3, 60):
        data[place] ^= 255
    path.write_bytes(data)
    facts = inspect_video(path)
    with pytest.raises(VideoError, match=r"damaged: .* \d\.\d\d s"):
        list(VideoReader(facts, 0, 60))
    kept = list(VideoReader(facts, 0, 60, keep_damaged=True))
    assert 10 < len(kept) <= 60


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.with_suffix(".none"), "no such file"),
        (lambda path: _bytes(path, b""), "not a video"),
        (lambda path: _bytes(path, b"hello\n" * 99), "not a video"),
        (lambda path: _bytes(path, Clip(frames=9).write(path).read_bytes()[:900]), "cut short"),
        (lambda path: _bytes(path, picture_bytes()), "a picture"),
        (lambda path: _sound(path.with_suffix(".m4a")), "no stream of pictures, only audio"),
        (
            lambda path: Clip(frames=0, sounds=(Sound(),)).write(path.with_suffix(".mkv")),
            "no stream of pictures",
        ),
        (lambda path: Clip(frames=5).write(path.with_suffix(".h264")), "5 of 5 frames have no"),
        (lambda path: _interlaced(path), "interlaced"),
        (lambda path: _dolby_vision(path), "Dolby Vision"),
        (lambda path: _renamed(path, b"zzzz"), "codec that is not known"),
    ],
    ids="absent empty text half picture sound frameless raw interlaced dolby codec".split(),
)
def test_what_is_no_video_is_refused_by_name(tmp_path, make, text):
    path = make(tmp_path / "clip.mp4")
    with pytest.raises(VideoError, match=text) as caught:
        inspect_video(path)
    assert path.name in str(caught.value)


def test_a_size_that_changes_in_the_stream_is_named(tmp_path):
    first, second = (
        Clip(frames=6, width=width, options={"bf": "0"}).write(tmp_path / f"{width}.h264")
        for width in (64, 96)
    )
    joined = tmp_path / "joined.h264"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    path = tmp_path / "joined.mkv"
    with av.open(str(joined)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        stamp = 0
        for packet in source.demux(video=0):
            if packet.size:
                packet.pts = packet.dts = stamp
                packet.time_base, packet.stream = Fraction(1, 25), stream
                target.mux(packet)
                stamp += 1
    facts = inspect_video(path)
    with pytest.raises(VideoError, match=r"frames are 96×48 yuv420p instead of 64×48"):
        list(VideoReader(facts, 0, facts.frames, keep_damaged=True))
    rest = video_part(facts, 6)  # as the error's hint says
    assert (rest.format.width, rest.frames) == (96, 12) and video_part(facts, 0) is facts
    assert [one.planes[0].shape for one in VideoReader(rest, 6, 12)] == 6 * [(48, 96)]
    made = tmp_path / "rest.mkv"
    assert lowtide.video(path, made, frames="6:12", scale=1, codec="ffv1").videos[0].width == 96
    assert inspect_video(made).format.width == 96
    with pytest.raises(VideoError, match="instead of 64×48") as caught:
        lowtide.video(path, made, frames="2:", force=True)
    assert caught.value.hint == "--frames A:6, and --frames 6:B in another run"


def test_ranges_of_frames_and_of_time(tmp_path):
    facts = inspect_video(Clip(frames=20).write(tmp_path / "clip.mp4"))
    assert frame_range(facts, None, None) == (0, 20)
    assert frame_range(facts, "5:9", None) == (5, 9)
    assert frame_range(facts, "15:", None) == (15, 20)
    assert frame_range(facts, ":999", None) == (0, 20)
    assert frame_range(facts, None, "0.2:0.4") == (5, 10)
    for frames, time, text in (
        ("9:5", None, "holds no frame"),
        (None, "7:8", "--time 7:8 holds no frame"),
        ("five", None, "not a range"),
        ("1:x", None, "not a range"),
    ):
        with pytest.raises(UsageError, match=text):
            frame_range(facts, frames, time)


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _sound(path: Path) -> Path:
    with av.open(str(path), "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 48000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def _interlaced(path: Path) -> Path:
    return Clip(frames=5, options={"x264-params": "interlaced=1:tff=1"}).write(path)


def _dolby_vision(path: Path) -> Path:
    return _renamed(path, b"dvav")


def _renamed(path: Path, codec: bytes) -> Path:
    return _bytes(path, Clip(frames=2).write(path).read_bytes().replace(b"avc1", codec))
