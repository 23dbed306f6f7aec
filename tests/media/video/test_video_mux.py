"""Outputs of video: sound, subtitles, tags and times are those of the source."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lowtide import Cancelled, OutputError
from lowtide.media.video.mux import join_segments, verify_output_frames
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.video_facts import is_mirrored
from support.video_clips import Clip, Sound, Text, full_mkv, picture_bytes
from support.video_joins import Contents, decode, encode_segments, enlarge

TICK = Fraction(1, 1000)


def largest_difference(one: list[Fraction], other: list[Fraction]) -> Fraction:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    return full_mkv(tmp_path_factory.mktemp("film") / "film.mkv")


def test_matroska_keeps_all_of_matroska(film, tmp_path):
    """Report video2x 174: fonts and chapters were lost."""
    plan, joined = enlarge(film, tmp_path / "out.mkv", codec="x265")
    verify_output_frames(joined)
    before, after = Contents(film), Contents(joined.path)
    assert after.frames == before.frames
    assert after.sounds == before.sounds
    assert after.texts == before.texts
    assert after.attachments == before.attachments == {"clip.ttf": bytes(range(200))}
    assert after.chapters == before.chapters == [(0, 0.4, "Anfang"), (0.4, 0.9, "Schluss")]
    assert after.streams == before.streams
    assert after.marks == before.marks
    assert after.metadata["title"] == "Ein Film"
    assert after.picture_metadata["title"] == "Bild"
    assert plan.notes == joined.notes == ()


def test_mp4_takes_plain_subtitles_converted_and_says_what_it_cannot(film, tmp_path):
    """Report video2x 1320: styled subtitles and fonts made the whole output fail."""
    plan, joined = enlarge(film, tmp_path / "out.mp4")
    verify_output_frames(joined)
    words = [str(stream) for stream in plan.streams]
    assert words[2] == (
        "subtitle 2 (subrip, eng): converted into mov_text: MP4 files hold no subrip"
    )
    assert "ass, ger Schilder): converted into mov_text: MP4 files hold no ass" in words[3]
    assert (
        words[4] == "attachment 4 (clip.ttf): dropped: MP4 files hold no attachments such as this"
    )
    before, after = Contents(film), Contents(joined.path)
    assert after.frames == before.frames
    assert after.chapters == before.chapters
    assert after.streams[:2] == [("audio", "ger", "Deutsch"), ("subtitle", "eng", None)]
    assert len(after.texts) == 2
    for texts in after.texts:
        assert [(at, long) for _, at, long in texts] == [
            (TICK * 100, TICK * 300),
            (TICK * 500, TICK * 200),
        ]
        assert [data[2 : 2 + data[1]] for data, _, _ in texts] == [b"One", b"Two bits"]
    assert [data for data, _, _ in after.sounds[0]] == [data for data, _, _ in before.sounds[0]]
    times = [[at for _, at, _ in sound.sounds[0]] for sound in (before, after)]
    assert largest_difference(*times) <= TICK


def test_subtitles_of_mp4_become_srt_in_matroska(tmp_path):
    source = Clip(texts=(Text("mov_text", title="Text"),)).write(tmp_path / "in.mp4")
    plan, joined = enlarge(source, tmp_path / "out.mkv")
    verify_output_frames(joined)
    assert plan.streams[1].into == "subrip"
    after = Contents(joined.path)
    assert after.streams == [("subtitle", "eng", "Text")]
    (texts,) = after.texts
    assert [(at, long) for _, at, long in texts] == [
        (TICK * 100, TICK * 300),
        (TICK * 500, TICK * 200),
    ]
    assert [b"One" in texts[0][0], b"<i>Two</i>" in texts[1][0]] == [True, True]


def test_lines_shown_together_stay_so_in_mp4(tmp_path):
    lines = ((100, 400, "A"), (200, 200, "B"), (200, 500, "C"), (700, 100, "D"))
    source = Clip(texts=(Text(lines=lines),)).write(tmp_path / "in.mkv")
    _, joined = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(joined)
    (texts,) = Contents(joined.path).texts
    shown = [(int(at * 1000), int((at + long) * 1000), data[2:]) for data, at, long in texts]
    assert shown == [
        (100, 200, b"A"),
        (200, 400, b"A\nB\nC"),
        (400, 500, b"A\nC"),
        (500, 700, b"C"),
        (700, 800, b"D"),
    ]
    _, joined = enlarge(source, tmp_path / "out.mkv")
    verify_output_frames(joined)
    assert Contents(joined.path).texts == Contents(source).texts
    assert joined.notes == ()


@pytest.mark.parametrize(("ending", "rotation"), [("mp4", 90), ("mov", -90), ("mkv", 180)])
def test_players_turn_the_output_as_the_source(tmp_path, ending, rotation):
    source = Clip(frames=3, rotation=rotation).write(tmp_path / "in.mp4")
    _, joined = enlarge(source, tmp_path / f"out.{ending}", pixel_aspect=Fraction(4, 3))
    verify_output_frames(joined)
    frame = decode(joined.path)[0]
    assert frame.rotation == decode(source)[0].rotation
    assert not is_mirrored(frame)


def test_a_mirrored_picture_stays_mirrored(tmp_path):
    source = Clip(frames=3, rotation=90, mirrored=True).write(tmp_path / "in.mov")
    _, joined = enlarge(source, tmp_path / "out.mkv")
    turned = [
        (frame.rotation, is_mirrored(frame))
        for frame in (decode(source)[0], decode(joined.path)[0])
    ]
    assert turned[0] == turned[1] == (90, True)


def test_sound_keeps_the_time_before_and_after_the_picture(tmp_path):
    """Report video2x 1360: sound that starts later, or lasts longer, was moved."""
    sounds = (Sound(), Sound(start=0.5, seconds=2), Sound(codec="libopus", seconds=0.2))
    source = Clip(stamps=range(2560, 12800, 512), frames=20, sounds=sounds).write(
        tmp_path / "in.mp4"
    )
    _, joined = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(joined)
    before, after = Contents(source), Contents(joined.path)
    assert before.frames[0] == Fraction(1, 5)
    assert after.frames == before.frames
    assert after.sounds == before.sounds
    assert joined.shift == 0


def test_frames_that_players_hide_stay_out_and_sound_stays_in_time(tmp_path):
    """An edit list hides two frames; their sound stays before 0, where players hide it too."""
    stamps = range(-1024, 9216, 512)
    source = Clip(stamps=stamps, sounds=(Sound(start=-0.08),)).write(tmp_path / "in.mp4")
    _, joined = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(joined)
    before, after = Contents(source), Contents(joined.path)
    assert len(after.frames) == 18
    assert after.frames == before.frames
    assert after.sounds == before.sounds
    assert after.sounds[0][0][1] < 0


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_pictures_before_zero_are_moved_and_all_are_shown(tmp_path, ending):
    frames = decode(Clip(frames=6).write(tmp_path / "in.mp4"))
    target = tmp_path / f"out.{ending}"
    joined = join_segments(
        plan_streams(None, target, codec="h264"),
        encode_segments(frames, tmp_path / "work"),
        target,
        stamps=np.arange(-2, 4) * 512,
        time_base=Fraction(1, 12800),
    )
    verify_output_frames(joined)
    assert joined.shift == Fraction(2, 25)
    assert Contents(target).frames == [Fraction(place, 25) for place in range(6)]


@pytest.mark.parametrize(
    ("first", "second"), [("mp4", "mp4"), ("mp4", "mkv"), ("mkv", "mp4"), ("mkv", "mkv")]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_cover_art_is_no_second_picture(tmp_path, first, second, kind):
    """Report Waifu2x-Extension-GUI 431: a file with a thumbnail could not be processed."""
    cover = picture_bytes(kind)
    clip = Clip(frames=3, cover=cover).write(tmp_path / "in.mp4")
    source = clip if first == "mp4" else enlarge(clip, tmp_path / "in.mkv")[1].path
    _, joined = enlarge(source, tmp_path / f"out.{second}")
    verify_output_frames(joined)
    after = Contents(joined.path)
    assert len(after.frames) == 3
    assert [[data for data, _, _ in packets] for packets in after.covers] == [[cover]]


def test_a_phones_data_are_left_out_and_named(tmp_path):
    """Report REAL-Video-Enhancer 229: sound without a picture came out."""
    clip = Clip(data=True, sounds=(Sound(),), rotation=90)
    source = clip.write(tmp_path / "in.mp4")
    plan, joined = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(joined)
    assert [s.action for s in plan.streams] == ["enlarged", "copied", "dropped"]
    assert "data 2 (bin_data, und): dropped" in str(plan.streams[2])
    assert Contents(joined.path).sounds == Contents(source).sounds


@pytest.mark.parametrize("ending", ["mp4", "mov", "mkv"])
def test_a_timecode_is_kept(tmp_path, ending):
    source = Clip(frames=5, picture_tags={"timecode": "01:00:00:00"}).write(tmp_path / "in.mov")
    plan, joined = enlarge(source, tmp_path / f"out.{ending}")
    verify_output_frames(joined)
    tags = {key.lower(): text for key, text in Contents(joined.path).picture_metadata.items()}
    assert tags["timecode"] == "01:00:00:00"
    assert "a timecode, kept as the picture's tag" in plan.streams[1].reason


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_a_broadcast_begins_at_zero(tmp_path, ending):
    source = Clip(
        stamps=range(900_000, 936_000, 3600),
        frames=10,
        time_base=Fraction(1, 90_000),
        sounds=(Sound(start=10.1, seconds=0.3),),
    ).write(tmp_path / "in.ts", mpegts_copyts="1")
    before = Contents(source)
    plan, joined = enlarge(source, tmp_path / f"out.{ending}")
    verify_output_frames(joined)
    assert before.frames[0] >= 10
    assert "10.000 s earlier: broadcasts begin at any time" in plan.notes[0]
    after = Contents(joined.path)
    assert after.frames == [Fraction(place, 25) for place in range(10)]
    late = [sound.sounds[0][0][1] - sound.frames[0] for sound in (before, after)]
    assert abs(late[0] - late[1]) <= TICK


@pytest.mark.parametrize("ending", ["mkv", "mp4"])
def test_a_part_begins_at_zero_with_its_own_sound(film, tmp_path, ending):
    before = Contents(film)
    first, end = before.frames[5], before.frames[15]
    _, joined = enlarge(
        film,
        tmp_path / f"out.{ending}",
        frames=slice(5, 15),
        last_duration=int((end - before.frames[14]) / TICK),
    )
    verify_output_frames(joined)
    after = Contents(joined.path)
    assert after.frames == [at - first for at in before.frames[5:15]]
    due = [(data, at - first) for data, at, _ in before.sounds[0] if first <= at < end]
    assert [data for data, _, _ in after.sounds[0]] == [data for data, _ in due]
    assert largest_difference([at for _, at, _ in after.sounds[0]], [at for _, at in due]) <= TICK
    assert [(at, long) for _, at, long in after.texts[0]] == [
        (0, TICK * 400 - first),
        (TICK * 500 - first, end - TICK * 500),
    ]
    assert after.chapters == [(0, 0.19, "Anfang"), (0.19, 0.42, "Schluss")]


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_an_old_avi_file_keeps_its_sound(tmp_path, ending):
    source = Clip(
        codec="mpeg4", time_base=Fraction(1, 25), sounds=(Sound(codec="libmp3lame"),)
    ).write(tmp_path / "in.avi")
    _, joined = enlarge(source, tmp_path / f"out.{ending}")
    verify_output_frames(joined)
    before, after = Contents(source), Contents(joined.path)
    assert after.frames == before.frames
    assert [[p[:2] for p in s] for s in after.sounds] == [[p[:2] for p in s] for s in before.sounds]


def test_tags_that_mp4_has_no_place_for_are_named(tmp_path):
    tags = {"title": "Film", "artist": "Jemand", "my_own": "tag"}
    source = Clip(frames=3, metadata=tags).write(tmp_path / "in.mkv")
    plan, joined = enlarge(source, tmp_path / "out.mp4")
    assert plan.notes == ("MP4 files have no place for the tags MY_OWN",)
    assert Contents(joined.path).metadata["title"] == "Film"
    quick, joined = enlarge(source, tmp_path / "out.mov")
    assert quick.notes == ()
    assert Contents(joined.path).metadata["MY_OWN"] == "tag"


def test_names_that_look_like_addresses_are_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Clip(frames=3).write(tmp_path / "in.mp4").rename("12:30.mp4")
    frames = decode(tmp_path / source)
    target = Path("12:31.mkv")
    plan = plan_streams(source, target, codec="h264")
    paths = encode_segments(frames, tmp_path / "work")
    stamps = np.array([frame.pts for frame in frames])
    verify_output_frames(
        join_segments(plan, paths, target, stamps=stamps, time_base=frames[0].time_base)
    )
    assert target.exists()


def test_the_work_can_be_stopped_after_any_frame(film, tmp_path):
    """What stops it is an error of the caller's, after which no file is left."""
    counts = []

    def stop():
        counts.append(1)
        if len(counts) == 5:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        enlarge(film, tmp_path / "out.mkv", after_frame=stop)
    assert not (tmp_path / "out.mkv").exists()
    _, joined = enlarge(film, tmp_path / "out.mkv", after_frame=lambda: counts.append(1))
    assert len(counts) == 25
    with pytest.raises(Cancelled):
        counts.clear()
        verify_output_frames(joined, after_frame=stop)


def test_an_error_of_the_disk_leaves_no_file(tmp_path, film):
    target = tmp_path / "missing" / "out.mkv"
    with pytest.raises(OutputError, match="No such file"):
        join_segments(
            plan_streams(film, target, codec="h264"),
            encode_segments(decode(film)[:3], tmp_path / "work", pix_fmt="yuv420p"),
            target,
            stamps=np.arange(3),
            time_base=TICK,
        )
