"""`lowtide video` and `lowtide plan video` on the command line."""

import pytest

pytest.importorskip("av")

from support.video_clips import Clip, Sound, Text


@pytest.fixture
def clip(tmp_path):
    sounds = (Sound(language="ger"),)
    return Clip(frames=6, sounds=sounds, texts=(Text("ass"),)).write(tmp_path / "in.mkv")


def test_video(lowtide, clip, tmp_path):
    words, target = ("video", clip, "-b", "256MiB"), tmp_path / "out.mp4"
    planned = lowtide(*words, "-o", target, "--dry-run")
    assert planned.code == 0 and not target.exists()
    assert "6 frames over 0.2 s, in about" in planned.out
    assert "audio 1 (aac, ger): copied" in planned.out
    assert "x264, yuv420p" in planned.out
    done = lowtide(*words, "-o", target, "--report", "--quality", 20)
    assert done.code == 0 and "frames a second" in done.out and "6 written" in done.out
    assert target.exists() and (tmp_path / "out.mp4.lowtide.json").exists()
    refused = lowtide(*words, "-o", target)
    assert refused.code == 2 and "--force" in refused.err
    assert lowtide(*words).code == 2
    (video,) = lowtide(*words, "-o", target, "--force", "--frames", "2:4", "--json").json["videos"]
    assert (video["frames_in"], video["frames_out"], video["out_width"]) == (2, 2, 128)
    assert [one["action"] for one in video["streams"]][:2] == ["enlarged", "copied"]


def test_what_is_wrong_is_said_with_its_exit_code(lowtide, clip, tmp_path):
    target = tmp_path / "out.mkv"
    for words, code, text in (
        ((tmp_path / "none.mp4",), 2, "no such file"),
        ((clip, "--frames", "9:5"), 2, "holds no frame"),
        ((clip, "--codec", "ffv1", "--quality", 3), 2, "ffv1 has no quality"),
        ((clip, "--preset", "warp"), 2, "x264 has no preset 'warp'"),
        ((clip, "--quality", 99), 2, "quality 99"),
        ((clip, "-m", "lowtide-denoise"), 2, "denoiser"),
        ((clip, "--png-compression", 3), 2, "No such option"),
    ):
        done = lowtide("video", *words, "-o", target)
        assert done.code == code and text in " ".join(done.err.split())
    assert [one.name for one in tmp_path.iterdir()] == ["in.mkv"]


def test_a_plan_for_a_gpu_that_is_not_here(lowtide, clip, tmp_path):
    done = lowtide("plan", "video", clip, "-o", tmp_path / "out.mkv", "--device", "rtx3060-12gb")
    assert done.code == 0 and "← this plan" in done.out and "context" in done.out


def test_the_command_says_what_becomes_of_sound_before_work(lowtide, tmp_path):
    source = Clip(frames=3, sounds=(Sound(seconds=0.1),)).write(tmp_path / "in.mp4")
    words = ("video", source, "--dry-run", "-o", tmp_path / "out.webm")
    planned = " ".join(lowtide(*words).out.split())
    assert "audio 1 (aac, und): encoded into opus: WebM files hold no aac" in planned
    refused = lowtide(*words, "--sound", "copy")
    assert refused.code == 2 and "--sound auto encodes it" in " ".join(refused.err.split())
    assert "dropped: --sound none" in lowtide(*words, "--sound", "none").out
