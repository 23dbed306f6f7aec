"""Videos with sound that is encoded, and inputs that are refused before any work or damaged."""

from __future__ import annotations

import contextlib
import random
from fractions import Fraction
from pathlib import Path

import pytest

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import Cancelled, LowtideError, UsageError, VideoError  # noqa: E402
from lowtide.jobs.clips.work import segments_folder  # noqa: E402
from lowtide.jobs.video.settings import VideoSettings  # noqa: E402
from support.video_clips import Clip, Sound, Text, picture_bytes  # noqa: E402


def packets(path: Path) -> list[tuple[int, int | None, bytes]]:
    with av.open(str(path)) as opened:
        return [(one.stream_index, one.pts, bytes(one)) for one in opened.demux() if one.size]


def test_encoded_sound_is_the_same_after_a_stop(tmp_path):
    source = Clip(frames=20, sounds=(Sound(seconds=0.8),)).write(tmp_path / "in.mp4")
    target, calm, seen = tmp_path / "out.mkv", tmp_path / "calm.mkv", []
    with pytest.raises(Cancelled):
        lowtide.video(
            source,
            target,
            sound="opus",
            segment=4,
            progress=seen.append,
            cancel=lambda: len(seen) > 9,
        )
    assert not target.exists() and segments_folder(target).is_dir()
    resumed = lowtide.video(source, target, sound="opus", segment=4).videos[0]
    assert resumed.frames_resumed and resumed.streams[1].action == "encoded"
    lowtide.video(source, calm, sound="opus", segment=4)
    assert packets(target) == packets(calm)


def test_images_become_a_film_with_the_sound_of_a_file(tmp_path):
    song = Clip(frames=0, sounds=(Sound(seconds=0.3),)).write(tmp_path / "song.m4a")
    source = Clip(frames=6).write(tmp_path / "in.mp4")
    lowtide.video(source, tmp_path / "frames" / "%03d.png")
    film = tmp_path / "film.mp4"
    item = lowtide.video(tmp_path / "frames", film, fps=25, sound=song).videos[0]
    assert [one.text for one in item.streams] == ["audio 0 of song.m4a (aac, und): copied"]
    assert [one[2] for one in packets(film) if one[0] == 1] == [one[2] for one in packets(song)]
    with pytest.raises(UsageError, match="--sound are for videos"):
        lowtide.video(source, tmp_path / "more" / "%03d.png", sound="none")


def change_of_size(path: Path) -> Path:
    """A film whose pictures become wider after 6 frames."""
    with av.open(str(path), "w") as output:
        made = output.add_mux_stream("h264", rate=25, width=64, height=48)
        for place, width in enumerate((64, 96)):
            part = Clip(frames=6, width=width, options={"bf": "0"}).write(
                path.with_name(f"{width}.h264")
            )
            with av.open(str(part)) as opened:
                for count, packet in enumerate(one for one in opened.demux() if one.size):
                    packet.pts = packet.dts = 6 * place + count
                    packet.time_base, packet.stream = Fraction(1, 25), made
                    output.mux(packet)
    return path


@pytest.mark.parametrize("ending", ["mkv", "ts"])
def test_pictures_that_change_are_found_before_any_is_computed(tmp_path, ending):
    source, target, seen = change_of_size(tmp_path / f"in.{ending}"), tmp_path / "out.mkv", []
    for damaged in ("refuse", "keep"):
        with pytest.raises(
            VideoError, match=r"from frame 6 on, .* 96×48 .* instead of 64×48"
        ) as error:
            lowtide.video(source, target, damaged=damaged, progress=seen.append)
        assert error.value.hint == "--frames A:6, and --frames 6:B in another run"
    assert {one.phase for one in seen} == {"load"} and not segments_folder(target).exists()
    assert lowtide.video(source, target, frames="6:").videos[0].width == 96


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "v.mkv",
            b"ffconcat version 1.0\nfile other.mkv\n",
            "a playlist, a script or another kind",
        ),
        ("v.ts", b"#EXTM3U\n#EXTINF:1,\nother.mkv\n#EXT-X-ENDLIST\n", "not a video"),
        ("v.mp4", b"v=0\r\ns=x\r\nt=0 0\r\nm=video 9 RTP/AVP 96\r\n", "not a video"),
        ("v.webm", b"WEBVTT\n\n00:00.000 --> 00:01.000\nHi\n", "a playlist, a script"),
        ("v.mov", picture_bytes("PNG"), "a picture"),
        ("v.m4v", picture_bytes("AVIF"), "a picture"),
    ],
    ids="concat hls sdp text png avif".split(),
)
def test_files_that_name_others_and_pictures_are_no_videos(tmp_path, name, content, said):
    Clip(frames=3).write(tmp_path / "other.mkv")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VideoError, match=said):
        lowtide.video(tmp_path / name, tmp_path / "out.mkv")
    assert not (tmp_path / "out.mkv").exists()


def test_frames_that_are_hours_apart_are_damage(tmp_path):
    stamps = (0, 40, 80, 10**8)
    source = Clip(frames=4, stamps=stamps, time_base=Fraction(1, 1000)).write(tmp_path / "in.mkv")
    with pytest.raises(VideoError, match=r"frames 2 and 3 are 99,999\.9 s apart"):
        lowtide.video(source, tmp_path / "out.mkv")


def test_headers_that_cannot_be_read_are_damage(tmp_path):
    source = Clip(frames=6, options={"g": "1"}).write(tmp_path / "in.mp4")
    data = bytearray(source.read_bytes())
    first = data.index(b"mdat") + 4
    data[first : first + 4] = b"\x00\x00\x7f\xff"  # a size beyond the packet
    source.write_bytes(data)
    with pytest.raises(VideoError, match="damaged"):
        lowtide.video(source, tmp_path / "out.mkv")
    kept = lowtide.video(source, tmp_path / "out.mkv", damaged="keep").videos[0]
    assert kept.frames_out == 6


@pytest.mark.slow
def test_damaged_clips_are_refused_or_run(tmp_path):
    """A hundred draws in one process: no other error, and none that takes long."""
    clips = {
        "in.mp4": Clip(frames=6, sounds=(Sound(),), texts=(Text("mov_text"),)),
        "in.mkv": Clip(frames=6, sounds=(Sound(codec="libopus"),), texts=(Text("ass"),)),
        "in.webm": Clip(frames=6, codec="libvpx-vp9", sounds=(Sound(codec="libopus"),)),
        "in.avi": Clip(
            6, codec="mpeg4", time_base=Fraction(1, 25), sounds=(Sound(codec="libmp3lame"),)
        ),
        "in.ts": Clip(frames=6, time_base=Fraction(1, 90_000), sounds=(Sound(),)),
    }
    whole = {name: clip.write(tmp_path / name).read_bytes() for name, clip in clips.items()}
    chance = random.Random(74)
    for draw in range(100):
        name = chance.choice(list(whole))
        data = bytearray(whole[name])
        for _ in range(chance.choice((1, 2, 4, 8, 30, 100))):
            data[chance.randrange(chance.choice((800, len(data))))] = chance.randrange(256)
        source = tmp_path / f"{draw}{Path(name).suffix}"
        source.write_bytes(data)
        target = tmp_path / f"{draw} out.{chance.choice(('mp4', 'mkv'))}"
        with contextlib.suppress(LowtideError):
            lowtide.video(source, target, damaged=chance.choice(("keep", "refuse")))


def test_what_a_video_was_made_with_names_its_sound():
    """Where it is another one than release 0.2 had; the journals of that release stay good."""
    made_with = {
        sound: VideoSettings.of(sound=sound).made_with("0" * 64, "fp32")
        for sound in ("auto", "none")
    }
    assert "sound" not in made_with["auto"]
    assert made_with["none"] == {**made_with["auto"], "sound": "none"}
