"""What becomes of each stream of a video, said before work starts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lowtide import InputError, UsageError
from lowtide.media.video.other_streams import plan_streams
from lowtide.media.video.video_containers import CONTAINERS
from support.video_clips import Clip, Sound, Text, picture_bytes

# Codecs that each container holds; x264 and x265 belong to most.
HELD = {
    ".mp4": "h264 hevc av1 ffv1",
    ".mov": "h264 hevc prores",
    ".mkv": "h264 hevc av1 prores ffv1",
    ".webm": "av1",
}


@pytest.mark.parametrize("ending", HELD)
def test_a_codec_that_the_container_cannot_hold_is_refused(tmp_path, ending):
    for codec in ("h264", "hevc", "av1", "prores", "ffv1"):
        target = tmp_path / f"out{ending}"
        if codec in HELD[ending].split():
            assert plan_streams(None, target, codec=codec).container == CONTAINERS[ending]
            continue
        with pytest.raises(UsageError, match=f"hold no {codec} pictures") as caught:
            plan_streams(None, target, codec=codec)
        assert caught.value.hint
        assert "out.mkv" in caught.value.hint


@pytest.mark.parametrize("ending", [".avi", ".ts", ".flv", ".gif", ".txt", ""])
def test_other_containers_are_refused_by_name(tmp_path, ending):
    with pytest.raises(UsageError, match=r"the name may end in \.mp4") as caught:
        plan_streams(None, tmp_path / f"out{ending}", codec="h264")
    assert caught.value.hint == "name the output out.mkv"


def test_files_without_a_picture_are_refused(tmp_path):
    text = tmp_path / "in.mp4"
    text.write_text("no video at all")
    with pytest.raises(InputError, match="cannot be read as video"):
        plan_streams(text, tmp_path / "out.mp4", codec="h264")
    missing = tmp_path / "missing.mp4"
    with pytest.raises(InputError, match="no such file"):
        plan_streams(missing, tmp_path / "out.mp4", codec="h264")
    sound = Clip(frames=0, sounds=(Sound(seconds=0.1),), cover=picture_bytes()).write(
        tmp_path / "sound.mp4"
    )
    with pytest.raises(InputError, match="no picture stream"):
        plan_streams(sound, tmp_path / "out.mp4", codec="h264")


def fates(source, target, codec="h264"):
    return [(s.kind, s.action) for s in plan_streams(source, target, codec=codec).streams]


def test_each_container_gets_another_form_of_what_it_does_not_hold(tmp_path):
    sounds = (Sound(seconds=0.1), Sound(seconds=0.1, codec="libopus"))
    texts = (Text(), Text("ass"))
    source = Clip(frames=2, sounds=sounds, texts=texts).write(tmp_path / "in.mkv")
    plans = {
        ending: fates(source, tmp_path / f"out{ending}", "av1") for ending in (".mkv", ".webm")
    }
    plans[".mov"] = fates(source, tmp_path / "out.mov")
    actions = {ending: [action for _, action in plan[1:]] for ending, plan in plans.items()}
    assert actions == {
        ".mkv": ["copied", "copied", "copied", "copied"],
        ".webm": ["encoded", "copied", "converted", "converted"],
        ".mov": ["copied", "encoded", "converted", "converted"],
    }
    encoded = plan_streams(source, tmp_path / "out.mov", codec="h264").streams[2]
    assert (encoded.into, encoded.reason) == ("aac", "QuickTime files hold no opus")


def test_a_second_film_is_dropped_and_marks_that_are_lost_are_named(tmp_path):
    forced = Text(disposition=64)
    first = Clip(frames=2, texts=(forced,)).write(tmp_path / "in.mkv")
    (_, text) = plan_streams(first, tmp_path / "out.mov", codec="h264").streams
    assert text.reason == "QuickTime files hold no subrip; without the mark forced"
    (_, text) = plan_streams(first, tmp_path / "out.mkv", codec="h264").streams
    assert text.reason == ""
    second = Clip(frames=2, films=2).write(tmp_path / "two.mkv")
    plan = plan_streams(second, tmp_path / "out.mkv", codec="h264")
    assert [s.action for s in plan.streams] == ["enlarged", "dropped"]
    assert str(plan.streams[1]) == "video 1 (h264): dropped: the first picture stream is enlarged"


def test_pixels_that_are_not_square_are_kept_or_refused(tmp_path):
    source = Clip(frames=2, pixel_aspect=Fraction(4, 3)).write(tmp_path / "in.mp4")
    for name, codec in (("out.mkv", "h264"), ("out.mkv", "hevc"), ("out.mp4", "av1")):
        assert plan_streams(source, tmp_path / name, codec=codec).notes == ()
    with pytest.raises(
        UsageError, match=r"pixels are 4:3, which av1 in a \.mkv file cannot say"
    ) as caught:
        plan_streams(source, tmp_path / "out.mkv", codec="av1")
    assert caught.value.hint == "name the output out.mp4"
    with pytest.raises(UsageError) as caught:
        plan_streams(source, tmp_path / "out.mkv", codec="prores")
    assert caught.value.hint == "name the output out.mov"
