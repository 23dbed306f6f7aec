"""Sound of videos: copied where the container holds it, else encoded, and heard as before."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")

from lowtide import InputError, UsageError, VideoError  # noqa: E402
from lowtide.media.video.checks_before_work import tried_streams  # noqa: E402
from lowtide.media.video.mux import verify_output_frames  # noqa: E402
from lowtide.media.video.other_streams import plan_streams  # noqa: E402
from support.video_clips import Clip, Sound, Text  # noqa: E402
from support.video_joins import Contents, enlarge  # noqa: E402

RATE = 48_000


def heard(path: Path, seconds: float = 2.0) -> np.ndarray:
    """Left channel of the first sound as it is played, from 0 on, at 48,000 samples a second."""
    played, end = np.zeros(int(seconds * RATE), np.float32), 0
    with av.open(str(path)) as opened:
        resampler = av.AudioResampler("flt", "mono", RATE)
        frames = [*opened.decode(audio=0), None]
        for part in (part for frame in frames for part in resampler.resample(frame)):
            values = part.to_ndarray()[0]
            at = end if part.pts is None else round(part.pts * part.time_base * RATE)
            at = end if abs(at - end) <= 0.0015 * RATE else at  # stamps of Matroska are rounded
            room = played[at : at + len(values)]
            room[:] = values[: len(room)]
            end = at + len(values)
    return played


def lateness(before: np.ndarray, after: np.ndarray) -> float:
    """Seconds by which one sound is later than another, where they are most alike."""
    size = len(before)
    alike = np.fft.irfft(np.fft.rfft(before, 2 * size).conj() * np.fft.rfft(after, 2 * size))
    place = int(alike.argmax())
    assert alike[place] > 0.9 * np.sqrt((before**2).sum() * (after**2).sum())
    return (place if place < size else place - 2 * size) / RATE


def pulse(path: Path, codec: str, rate: int, layout: str, start: Fraction = Fraction(0)) -> Path:
    """A clip with a short tone 0.3 s after its sound begins, which that tells the time of."""
    picture = Clip(frames=20).write(path.with_name("picture.mp4"))
    with av.open(str(picture)) as shown, av.open(str(path), "w") as output:
        copied = output.add_stream_from_template(shown.streams.video[0], opaque=True)
        sound = output.add_stream(codec, rate=rate)
        sound.codec_context.layout = layout
        sound.codec_context.open()
        packets = [packet for packet in shown.demux() if packet.size]
        for packet in packets:
            packet.stream = copied
        times = np.arange(rate * 3 // 5) / rate - 0.3
        wave = 0.5 * np.exp(-((times / 0.004) ** 2)) * np.sin(2 * np.pi * 900 * times + 1)
        count, size = len(av.AudioLayout(layout).channels), sound.codec_context.frame_size
        for first in range(0, len(wave), size or 1024):
            part = np.repeat(wave[first : first + (size or 1024), None], count, axis=1)
            values = part.astype(np.float32).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(values, "flt", layout)
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = first + round(start * rate)
            packets += sound.encode(frame)
        packets += sound.encode(None)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            output.mux(packet)
    return path


@pytest.mark.parametrize(
    ("name", "codec", "rate", "layout", "start", "target", "into"),
    [
        ("in.mp4", "aac", 44_100, "stereo", Fraction(1, 5), "out.webm", "opus"),
        ("in.mkv", "libopus", 48_000, "mono", Fraction(0), "out.mov", "aac"),
        ("in.mkv", "flac", 48_000, "5.1(side)", Fraction(1, 7), "out.webm", "opus"),
        ("in.mkv", "flac", 96_000, "7.1", Fraction(1, 3), "out.mov", "aac"),
        ("in.ts", "mp2", 32_000, "stereo", Fraction(0), "out.webm", "opus"),
    ],
)
def test_sound_that_a_container_does_not_hold_is_encoded_in_time(
    tmp_path, name, codec, rate, layout, start, target, into
):
    source = pulse(tmp_path / name, codec, rate, layout, start)
    picture = "av1" if target.endswith("webm") else "h264"
    plan = plan_streams(source, tmp_path / target, codec=picture)
    sound = next(one for one in plan.streams if one.kind == "audio")
    assert (sound.action, sound.into) == ("encoded", into)
    assert f"encoded into {into}: " in str(sound) and "files hold no" in sound.reason
    _, joined = enlarge(source, tmp_path / target, codec={"av1": "svtav1"}.get(picture, "x264"))
    verify_output_frames(joined)
    with av.open(str(joined.path)) as opened:
        assert opened.streams.audio[0].codec_context.codec.canonical_name == into
        frame = next(opened.decode(audio=0))
        assert len(frame.layout.channels) == len(av.AudioLayout(layout).channels)
    late = lateness(heard(source), heard(joined.path))
    assert abs(late - float(joined.shift)) <= 0.001


@pytest.mark.parametrize("target", ["out.mkv", "out.mov"])
def test_matroska_holds_sound_by_microsofts_names(tmp_path, target):
    source = Clip(
        codec="mpeg4", time_base=Fraction(1, 25), sounds=(Sound(codec="pcm_alaw"),)
    ).write(tmp_path / "in.avi")
    plan, joined = enlarge(source, tmp_path / target)
    verify_output_frames(joined)
    assert plan.streams[1].action == "copied"
    assert (heard(joined.path) == heard(source)).all()


@pytest.mark.parametrize("start", [0.0, -0.25])
def test_what_an_edit_list_hides_is_not_heard_in_matroska(tmp_path, start):
    """Phones trim clips by an edit list, and every AAC encoder hides what it begins with."""
    source = Clip(sounds=(Sound(start=start),)).write(tmp_path / "in.mp4")
    plan, joined = enlarge(source, tmp_path / "out.mkv")
    verify_output_frames(joined)
    assert plan.streams[1].action == "copied" and joined.shift == 0
    assert Contents(joined.path).frames == Contents(source).frames
    before, after = heard(source), heard(joined.path)
    # AAC's decoder draws noise, other one where it begins elsewhere.
    assert np.abs(before).max() > 0.1 and np.abs(before - after).max() < 0.01
    _, again = enlarge(joined.path, tmp_path / "again.mkv")
    assert (heard(again.path) == after).all()
    _, back = enlarge(joined.path, tmp_path / "back.mp4")
    assert abs(lateness(before, heard(back.path))) <= 0.001


def test_what_sound_is_asked_for_is_done_or_refused(tmp_path):
    source = Clip(frames=3, sounds=(Sound(seconds=0.2),)).write(tmp_path / "in.mp4")

    def fate(target: str, sound: str) -> tuple[str, str]:
        codec = "av1" if target.endswith("webm") else "h264"
        plan = plan_streams(source, tmp_path / target, codec=codec, sound=sound)
        return plan.all_streams[-1].action, plan.all_streams[-1].into

    assert fate("out.mkv", "copy") == fate("out.mkv", "aac") == ("copied", "")
    assert fate("out.mkv", "none") == ("dropped", "")
    assert fate("out.mkv", "flac") == ("encoded", "flac")
    with pytest.raises(UsageError, match="sound 1 cannot be copied: WebM files hold no") as caught:
        fate("out.webm", "copy")
    assert caught.value.hint == "name the output out.mkv, or --sound auto encodes it"
    with pytest.raises(UsageError, match=r"cannot be encoded into aac in a \.webm") as caught:
        fate("out.webm", "aac")
    assert "--sound auto" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"--sound song\.wav is no file"):
        fate("out.mkv", "song.wav")
    silent = Clip(frames=3).write(tmp_path / "silent.mp4")
    with pytest.raises(UsageError, match="there is no sound in it"):
        fate("out.mkv", str(silent))
    other = Clip(frames=0, sounds=(Sound(codec="libopus"),)).write(tmp_path / "song.mkv")
    assert fate("out.webm", str(other)) == ("copied", "")
    with pytest.raises(InputError, match="cannot be read as video"):
        fate("out.mkv", __file__)


def broken_adts(path: Path, places: tuple[int, ...]) -> Path:
    """A broadcast, in which headers of some frames of sound are no headers."""
    Clip(frames=10, sounds=(Sound(seconds=0.4),)).write(path)
    data, at = bytearray(path.read_bytes()), -1
    for place in range(max(places) + 1):
        at = data.index(b"\xff\xf1", at + 1)
        if place in places:
            data[at + 2 : at + 6] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    return path


def test_packets_that_the_muxer_refuses_are_found_before_work(tmp_path):
    source = broken_adts(tmp_path / "in.ts", (6, 7))
    plan = plan_streams(source, tmp_path / "out.mp4", codec="h264")
    with pytest.raises(VideoError, match="damaged: audio 1: its packet at") as caught:
        tried_streams(plan, keep_damaged=False)
    assert caught.value.hint == "--damaged keep takes what is there"
    kept = tried_streams(plan, keep_damaged=True)
    (note,) = kept.notes[-1:]
    assert note.endswith("packets of audio 1 are damaged and left out")
    assert kept.streams[1].reason == note
    assert kept.streams[1].left_out and kept.streams[1].action == "copied"


def test_a_stream_of_nothing_but_damage_is_left_out_if_damage_is_kept(tmp_path):
    source = Clip(frames=5, sounds=(Sound(codec="flac", seconds=0.2),)).write(tmp_path / "in.mkv")
    plan = plan_streams(source, tmp_path / "out.mov", codec="h264")
    data = source.read_bytes()
    source.write_bytes(data.replace(b"\xff\xf8", b"\0\0"))  # what every frame of FLAC begins with
    with pytest.raises(VideoError, match="damaged: audio 1"):
        tried_streams(plan, keep_damaged=False)
    kept = tried_streams(plan, keep_damaged=True)
    assert (kept.streams[1].action, kept.streams[1].reason) == ("dropped", "damaged")
    assert kept.notes == ("audio 1 is damaged and left out",)


def test_gaps_of_encoded_sound_are_silent_and_what_comes_twice_is_heard_once(tmp_path):
    source = pulse(tmp_path / "in.mkv", "flac", RATE, "mono")
    gap = tmp_path / "gap.mkv"
    with av.open(str(source)) as opened, av.open(str(gap), "w") as output:
        made = {s.index: output.add_stream_from_template(s, opaque=True) for s in opened.streams}
        sounds = 0
        for packet in opened.demux():
            if not packet.size:
                continue
            sounds += packet.stream_index == 1
            if packet.stream_index == 1 and sounds == 2:
                continue  # lost
            packet.stream = made[packet.stream_index]
            output.mux(packet)
    _, joined = enlarge(gap, tmp_path / "out.mov")
    assert abs(lateness(heard(source), heard(joined.path))) <= 0.001


def test_styled_subtitles_become_plain_ones_in_mp4(tmp_path):
    lines = ((100, 300, "{\\pos(10,20)\\b1}One"), (200, 100, "{\\p1}m 0 0 l 9 9{\\p0}"))
    source = Clip(frames=5, texts=(Text("ass", lines=lines),)).write(tmp_path / "in.mkv")
    plan, joined = enlarge(source, tmp_path / "out.mp4")
    verify_output_frames(joined)
    text = plan.streams[1]
    assert (text.action, text.into) == ("converted", "mov_text")
    assert text.reason == "MP4 files hold no ass, whose places and effects are lost"
    (texts,) = Contents(joined.path).texts
    assert [data[2 : 2 + data[1]] for data, _, _ in texts] == [b"One"]


def test_a_date_that_nobody_has_set_is_not_missed(tmp_path):
    for year, kept in ((1970, None), (2003, "2003-01-01T00:00:00.000000Z")):
        tags = {"creation_time": f"{year}-01-01T00:00:00.000000Z"}
        source = Clip(frames=3, metadata=tags).write(tmp_path / f"{year}.mkv")
        plan, joined = enlarge(source, tmp_path / f"{year}.mp4")
        assert plan.notes == ()
        assert Contents(joined.path).metadata.get("creation_time") == kept


def test_the_sound_of_another_file_goes_by_the_times_of_the_source(tmp_path):
    other = pulse(tmp_path / "song.mp4", "aac", 44_100, "stereo")
    clip = Clip(frames=20, sounds=(Sound(),))
    broadcast = clip.write(tmp_path / "in.ts")
    plan, _ = enlarge(broadcast, tmp_path / "plain.mkv")
    taken = plan_streams(broadcast, tmp_path / "out.mkv", codec="h264", sound=str(other))
    assert [one.action for one in taken.all_streams] == ["enlarged", "dropped", "copied"]
    assert "audio 1 of song.mp4 (aac, und): copied" in map(str, taken.all_streams)
    assert replace(taken, sound=None, streams=plan.streams) == plan
    _, joined = enlarge(broadcast, tmp_path / "out.mkv", sound=str(other))
    assert (heard(joined.path) == heard(other)).all()
