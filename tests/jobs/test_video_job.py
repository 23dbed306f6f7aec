"""Videos through an upscaler: the same file, larger; and what is left behind when that fails."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import BudgetError, UsageError, VideoError  # noqa: E402
from lowtide.media.video.video_facts import inspect_video  # noqa: E402
from support.video_clips import Clip, Sound, Text, full_mkv, rotated_mp4  # noqa: E402


def packets(path: Path, kind: str) -> list[tuple[Fraction, bytes]]:
    """Time and bytes of all packets of the first stream of a kind."""
    with av.open(str(path)) as container:
        stream = next(one for one in container.streams if one.type == kind)
        return [
            ((one.pts or 0) * one.time_base, bytes(one))
            for one in container.demux(stream)
            if one.size
        ]


def frames_of(path: Path) -> tuple[list[np.ndarray], list[Fraction]]:
    with av.open(str(path)) as container:
        found = [(one.to_ndarray(), one.pts * one.time_base) for one in container.decode(video=0)]
    return [one for one, _ in found], [time for _, time in found]


@pytest.fixture
def clip(tmp_path):
    """20 frames with sound and subtitles."""
    return Clip(frames=20, sounds=(Sound(start=0.1),), texts=(Text(),)).write(tmp_path / "in.mkv")


def photo_clip(path: Path, photo: np.ndarray, frames: int, **more: str) -> Path:
    """A walk over the photograph, 96×64."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"crf": "1", **more})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        for place in range(frames):
            rows = np.ascontiguousarray(photo[120 : 120 + 64, 200 + 2 * place : 296 + 2 * place])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(rows, "rgb24")))
        output.mux(stream.encode(None))
    return path


def left_over(folder: Path, *expected: str) -> set[str]:
    return {one.name for one in folder.iterdir()} - set(expected)


def test_a_clip_is_doubled_with_its_sound_and_stamps(clip, tmp_path):
    target, events = tmp_path / "out.mkv", []
    report = lowtide.video(clip, target, segment=8, sidecar=True, progress=events.append)
    item = report.videos[0]
    assert (item.status, item.frames_in, item.frames_out, item.frames_resumed) == (
        "done",
        20,
        20,
        0,
    )
    assert (item.width, item.out_width, item.pixel_format) == (64, 128, "yuv420p")
    assert [one.action for one in item.streams] == ["enlarged", "copied", "copied"]
    assert item.memory.within_budget and item.fps > 0
    images, times = frames_of(target)
    _, expected = frames_of(clip)
    assert times == expected and images[0].shape == (144, 128)
    assert packets(target, "audio") == packets(clip, "audio")
    assert events[-2].unit == "frames" and events[-2].done == events[-2].total == 20
    written = json.loads((tmp_path / "out.mkv.lowtide.json").read_text())["video"]
    assert written["frames_out"] == 20
    assert not left_over(tmp_path, "in.mkv", "out.mkv", "out.mkv.lowtide.json")


def test_frames_are_what_the_model_makes_whatever_the_segments(tmp_path, photo, model):
    source = photo_clip(tmp_path / "in.mkv", photo, 5)
    made = {}
    for segment in (1, 2, 100):
        target = tmp_path / f"{segment}.mkv"
        lowtide.video(source, target, segment=segment, codec="ffv1")
        made[segment] = frames_of(target)
    for images, times in made.values():
        assert times == made[1][1]
        assert all((a == b).all() for a, b in zip(images, made[1][0], strict=True))
    for place, image in enumerate(made[2][0]):
        rows = photo[120 : 120 + 64, 200 + 2 * place : 296 + 2 * place]
        values = torch.from_numpy(rows / np.float32(255)).permute(2, 0, 1)[None]
        red, green, blue = model(values)[0].clamp(0, 1).numpy()
        luma = 16 + 219 * (0.299 * red + 0.587 * green + 0.114 * blue)
        assert np.abs(image[0] - luma).mean() < 1.5


def test_a_part_is_cut_with_its_sound(clip, tmp_path):
    report = lowtide.video(clip, tmp_path / "part.mkv", frames="5:15")
    images, times = frames_of(tmp_path / "part.mkv")
    assert report.videos[0].frames_out == len(images) == 10
    assert times[0] == 0 and float(times[-1]) == pytest.approx(0.36, abs=0.002)
    sound = packets(tmp_path / "part.mkv", "audio")
    assert 0 < len(sound) < len(packets(clip, "audio"))
    lowtide.video(clip, tmp_path / "time.mkv", time="0.2:0.6")
    again, _ = frames_of(tmp_path / "time.mkv")
    assert all((a == b).all() for a, b in zip(images, again, strict=True))


def test_a_deep_uneven_clip_stays_so(tmp_path):
    source, target = full_mkv(tmp_path / "in.mkv", 10), tmp_path / "out.mkv"
    report = lowtide.video(source, target)
    assert report.videos[0].encoder.startswith("x265")
    assert report.videos[0].pixel_format == "yuv420p10le"
    assert frames_of(target)[1] == frames_of(source)[1]


def test_hdr_keeps_its_tags(tmp_path):
    names = "color_primaries", "color_trc", "colorspace", "color_range"
    source, target = tmp_path / "in.mkv", tmp_path / "out.mkv"
    tags = dict(zip(names, (9, 16, 9, 1), strict=True))
    light = "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,1)"
    params = "log-level=none:pools=none:frame-threads=1:hdr10=1:max-cll=1000,400"
    options = {"x265-params": f"{params}:master-display={light}"}
    clip = Clip(frames=2, codec="libx265", pix_fmt="yuv420p10le", options=options, tags=tags)
    lowtide.video(clip.write(source), target)
    assert inspect_video(target).light == inspect_video(source).light is not None
    with av.open(str(target)) as made:
        frame = next(made.decode(video=0))
    assert {name: int(getattr(frame, name)) for name in names} == tags


def test_a_gray_clip_stays_gray(tmp_path):
    source = Clip(frames=2, codec="ffv1", pix_fmt="gray").write(tmp_path / "in.mkv")
    report = lowtide.video(source, tmp_path / "out.mkv", codec="ffv1")
    assert report.videos[0].pixel_format == "gray"
    assert frames_of(tmp_path / "out.mkv")[0][0].shape == (96, 128)


def test_a_budget_that_the_encoder_exceeds_names_it(tmp_path):
    source = Clip(frames=1, width=320, height=240).write(tmp_path / "in.mp4")
    target, options = tmp_path / "out.mp4", {"budget": "110MiB", "tile": 64, "dry_run": True}
    with pytest.raises(BudgetError) as caught:
        lowtide.video(source, target, **options)
    assert "are the encoder's: --codec ffv1" in caught.value.hint
    planned = lowtide.video(source, target, preset="superfast", **options)
    assert planned.videos[0].status == "planned"


def test_a_turned_clip_is_measured_as_it_is_shown(tmp_path):
    source, target = rotated_mp4(tmp_path / "in.mp4", 3), tmp_path / "out.mp4"
    report = lowtide.video(source, target, width=96)
    item = report.videos[0]
    assert (item.width, item.height, item.out_width, item.out_height) == (64, 48, 128, 96)
    with av.open(str(target)) as made:
        assert next(made.decode(video=0)).rotation == 90


@pytest.mark.parametrize("frames", [1, 3])
def test_a_clip_shorter_than_a_segment(tmp_path, frames):
    source, target = Clip(frames=frames).write(tmp_path / "in.mp4"), tmp_path / "out.mp4"
    assert lowtide.video(source, target).videos[0].frames_out == frames
    assert len(frames_of(target)[0]) == frames


def test_a_frame_is_resized_where_the_scale_is_not_the_models(tmp_path, photo):
    source, target = photo_clip(tmp_path / "in.mp4", photo, 2), tmp_path / "out.mp4"
    item = lowtide.video(source, target, scale=1.5).videos[0]
    assert (item.out_width, item.out_height) == (144, 96)
    before, after = frames_of(source)[0][0][0], frames_of(target)[0][0][0]
    shown = after.reshape(32, 3, 48, 3).mean((1, 3))
    assert np.abs(shown - before.reshape(32, 2, 48, 2).mean((1, 3))).mean() < 2
    assert any("resized to 144×96" in note for note in item.notes)


def test_bands_of_rows_make_the_same_frames(tmp_path):
    source, images = Clip(frames=1, codec="ffv1").write(tmp_path / "in.mkv"), []
    for strategy, tile in (("whole", None), ("tiled", 32), ("streamed", None)):
        target = tmp_path / f"{strategy}.mkv"
        report = lowtide.video(source, target, codec="ffv1", strategy=strategy, tile=tile)
        assert report.videos[0].plan.strategy.name == strategy
        images.append(frames_of(target)[0][0].astype(int))
    assert all(np.abs(images[0] - other).max() <= 1 for other in images[1:])


def test_a_dry_run_names_the_streams_and_writes_nothing(clip, tmp_path):
    report = lowtide.video(clip, tmp_path / "out.mp4", dry_run=True)
    item = report.videos[0]
    assert (item.status, item.frames_in, item.frames_out) == ("planned", 20, 0)
    assert item.streams[2].action == "converted" and item.streams[2].into == "mov_text"
    assert item.plan_seconds == pytest.approx(20 * item.plan.seconds)
    assert not left_over(tmp_path, "in.mkv")


def test_a_folder_of_clips_is_resumed_and_a_bad_one_reported(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    Clip(frames=2).write(folder / "a.mp4")
    (folder / "b.mp4").write_bytes(b"nothing")
    report = lowtide.video(folder, out)
    assert [one.status for one in report.videos] == ["done", "failed"]
    assert "not a video" in report.videos[1].error
    assert [one.status for one in lowtide.video(folder, out).videos] == ["skipped", "failed"]
    assert not left_over(out, "a.mp4", ".lowtide-journal.jsonl")


def test_damaged_frames_are_refused_or_repeated(tmp_path):
    source, target = tmp_path / "in.mp4", tmp_path / "out.mp4"
    Clip(frames=30, width=128, height=96, options={"g": "30"}).write(source)
    data, generator = bytearray(source.read_bytes()), np.random.default_rng(1)
    for place in generator.integers(len(data) // 3, len(data) * 2 // 3, 60):
        data[place] ^= 255
    source.write_bytes(data)
    with pytest.raises(VideoError, match="damaged"):
        lowtide.video(source, target)
    assert not left_over(tmp_path, "in.mp4")
    report = lowtide.video(source, target, damaged="keep", segment=15)
    assert report.videos[0].frames_out == len(frames_of(target)[0]) == 30


def test_every_frame_comes_out_whatever_their_count(tmp_path):
    """Reports video2x 1371 and FlashVSR 3: frames were estimated, and 81 became 77."""
    clip = Clip(frames=81, sounds=(Sound(start=0.2, seconds=3.3),))
    source, target = clip.write(tmp_path / "in.mp4"), tmp_path / "out.mp4"
    item = lowtide.video(source, target, segment=20).videos[0]
    assert (item.frames_in, item.frames_out) == (81, 81)
    assert frames_of(target)[1] == frames_of(source)[1]
    assert packets(target, "audio") == packets(source, "audio")


def test_a_phones_clip_stays_what_it_is(tmp_path):
    """Report REAL-Video-Enhancer 229: of a turned HLG clip only the sound came out."""
    clip = Clip(
        frames=3,
        codec="libx265",
        pix_fmt="yuv420p10le",
        options={"x265-params": "log-level=none"},
        tags={"color_primaries": 9, "color_trc": 18, "colorspace": 9, "color_range": 1},
        rotation=90,
        sounds=(Sound(),),
    )
    source, target = clip.write(tmp_path / "in.mov"), tmp_path / "out.mov"
    lowtide.video(source, target)
    with av.open(str(target)) as made:
        frame = next(made.decode(video=0))
    assert (frame.format.name, frame.rotation, frame.color_trc) == ("yuv420p10le", 90, 18)
    assert packets(target, "audio") == packets(source, "audio")


def test_half_a_file_is_refused_or_kept_and_said(tmp_path):
    source, target = Clip(frames=64).write(tmp_path / "in.mkv"), tmp_path / "out.mkv"
    source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    with pytest.raises(VideoError, match=r"it ends after \d\.\d\d s, and its header says 2\.5"):
        lowtide.video(source, target)
    item = lowtide.video(source, target, damaged="keep").videos[0]
    assert 0 < item.frames_out < 64
    assert any(note.startswith("the file is damaged: it ends after") for note in item.notes)


@pytest.mark.parametrize(
    ("target", "options", "error", "text"),
    [
        ("in.mkv", {}, UsageError, "in.mkv"),
        ("out.avi", {}, UsageError, "avi"),
        ("out", {}, UsageError, "out"),
        ("out.mkv", {"frames": "90:"}, UsageError, "holds no frame"),
        ("out.mkv", {"frames": "1:2", "time": "1:2"}, UsageError, "contradict"),
        ("out.mkv", {"max_pixels": 100}, VideoError, "64 × 48"),
        ("out.mkv", {"budget": "2MiB", "strategy": "whole"}, BudgetError, r"2\.00 MiB"),
        ("out.mkv", {"png_compression": 9}, UsageError, "png_compression"),
        ("out.webm", {"codec": "x264"}, UsageError, "h264"),
        ("out.mkv", {"codec": "h263"}, UsageError, "codec"),
    ],
)
def test_what_cannot_be_done_is_said_before_work_starts(
    clip, tmp_path, target, options, error, text
):
    with pytest.raises(error, match=text):
        lowtide.video(clip, tmp_path / target, **options)
    assert not left_over(tmp_path, "in.mkv")


def test_an_existing_output_is_not_replaced_without_force(clip, tmp_path):
    target = tmp_path / "out.mkv"
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already exists"):
        lowtide.video(clip, target)
    lowtide.video(clip, target, force=True, frames="0:2")
    assert len(frames_of(target)[0]) == 2


def test_memory_does_not_grow_with_the_length(tmp_path):
    peaks = []
    for frames in (40, 160):
        source = Clip(frames=frames).write(tmp_path / f"{frames}.mp4")
        report = lowtide.video(source, tmp_path / f"out{frames}.mp4", segment=30, budget="256MiB")
        memory = report.videos[0].memory
        assert memory.peak_bytes <= memory.upper_bytes <= memory.budget_bytes
        peaks.append(memory.peak_bytes)
    assert peaks[1] <= peaks[0] * 1.1 + (4 << 20)


@pytest.mark.slow
def test_two_processes_make_the_files_of_one(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.mp4", "b.mp4"):
        Clip(frames=3).write(folder / name)
    report = lowtide.video(folder, tmp_path / "two", devices="cpu,cpu", budget="512MiB")
    assert [one.status for one in report.videos] == ["done", "done"]
    lowtide.video(folder, tmp_path / "one", budget="512MiB")
    for name in ("a.mp4", "b.mp4"):
        one, two = (frames_of(tmp_path / place / name) for place in ("one", "two"))
        assert one[1] == two[1]
        assert all((a == b).all() for a, b in zip(one[0], two[0], strict=True))
