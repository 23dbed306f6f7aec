"""Image sequences through an upscaler: as input, as output, and both."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import Cancelled, OutputError, UsageError, VideoError  # noqa: E402
from lowtide.jobs.clips.work import segments_folder  # noqa: E402
from support.video_clips import Clip, Sound, rotated_mp4  # noqa: E402


def frames_of(path: Path, name: str) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [one.to_ndarray(format=name) for one in container.decode(video=0)]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as opened:
        return np.asarray(opened).astype(int)


def is_begun(target: Path) -> bool:
    """Whether a segment is finished."""
    return any(segments_folder(target).glob("[0-9]*.json"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@pytest.fixture
def frames(tmp_path):
    """Eight frames from number 3 on."""
    folder, generator = tmp_path / "frames", np.random.default_rng(1)
    folder.mkdir()
    for number in range(3, 11):
        pixels = generator.integers(0, 256, (32, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"shot_{number:04}.png")
    return folder


def test_a_sequence_becomes_a_movie(frames, tmp_path):
    target = tmp_path / "out.mkv"
    item = lowtide.video(frames, target, fps=24, codec="ffv1", segment=3).videos[0]
    assert (item.frames_in, item.frames_out, item.out_width) == (8, 8, 96)
    assert item.seconds_in == pytest.approx(8 / 24)
    with av.open(str(target)) as made:
        times = [float(one.pts * one.time_base) for one in made.decode(video=0)]
    assert times == pytest.approx(np.arange(8) / 24, abs=1e-3)
    lowtide.upscale(frames / "shot_0005.png", tmp_path / "one.png")
    due = pixels(tmp_path / "one.png")
    assert np.abs(frames_of(target, "rgb24")[2] - due).max() <= 1


def test_a_movie_becomes_a_sequence_with_the_numbers_of_its_frames(tmp_path):
    source = Clip(frames=6, sounds=(Sound(),)).write(tmp_path / "in.mp4")
    item = lowtide.video(source, tmp_path / "out" / "%03d.png", frames="2:5").videos[0]
    assert sorted(bytes_of(tmp_path / "out")) == ["002.png", "003.png", "004.png"]
    assert [one.action for one in item.streams] == ["enlarged", "dropped"]
    assert any("--fps 25 gives them back" in note for note in item.notes)
    lowtide.video(source, tmp_path / "folder", format="tif")
    assert sorted(bytes_of(tmp_path / "folder")) == [f"{one:06}.tif" for one in range(6)]
    first = pixels(tmp_path / "out" / "003.png")
    again = pixels(tmp_path / "folder" / "000003.tif")
    assert (first == again).all() and first.shape == (96, 128, 3)


def test_more_than_8_bits_are_kept(tmp_path):
    options = {"x265-params": "log-level=none"}
    clip = Clip(frames=2, codec="libx265", pix_fmt="yuv420p10le", options=options)
    source, out = clip.write(tmp_path / "in.mkv"), tmp_path / "out"
    lowtide.video(source, out / "%d.tif")
    lowtide.video(out, tmp_path / "again.mkv", fps=25, codec="ffv1")
    with av.open(str(tmp_path / "again.mkv")) as made:
        assert next(made.decode(video=0)).format.name == "gbrp16le"
    Image.new("L", (16, 16), 100).save(tmp_path / "1.png")
    item = lowtide.video(tmp_path / "%d.png", tmp_path / "gray" / "%d.png").videos[0]
    assert item.pixel_format == "gray" and pixels(tmp_path / "gray" / "1.png").ndim == 2


def test_an_opaque_alpha_channel_is_left_out_and_the_first_other_one_named(frames, tmp_path):
    lowtide.video(frames, tmp_path / "plain" / "%d.png")
    for path in frames.iterdir():
        Image.open(path).convert("RGBA").save(path)
    lowtide.video(frames, tmp_path / "alpha" / "%d.png")
    assert bytes_of(tmp_path / "alpha") == bytes_of(tmp_path / "plain")
    seen = Image.open(frames / "shot_0005.png")
    seen.putpixel((9, 9), (1, 2, 3, 254))
    seen.save(frames / "shot_0005.png")
    with pytest.raises(VideoError, match=r"shot_0005\.png: it has transparency"):
        lowtide.video(frames, tmp_path / "other" / "%d.png")


def test_a_turned_clip_is_written_as_it_is_shown(tmp_path):
    source = rotated_mp4(tmp_path / "in.mp4", 2)
    item = lowtide.video(source, tmp_path / "%d.png").videos[0]
    assert pixels(tmp_path / "1.png").shape == (128, 96, 3)
    assert "frames are turned as players show them" in item.notes


def test_a_sequence_keeps_its_names_and_profile(frames, tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for path in frames.iterdir():
        Image.fromarray(pixels(path).astype(np.uint8)).save(path, icc_profile=profile)
    report = lowtide.video(frames, f"{tmp_path / 'out'}/", frames="4:6", sidecar=True)
    item = report.videos[0]
    assert (item.frames_in, item.seconds_in) == (2, 0)
    found = sorted(bytes_of(tmp_path / "out"))
    assert found == ["shot_%04d.png.lowtide.json", "shot_0004.png", "shot_0005.png"]
    with Image.open(tmp_path / "out" / "shot_0004.png") as made:
        assert made.info["icc_profile"] == profile and made.size == (96, 64)
    movie = lowtide.video(frames, tmp_path / "out.mkv", fps="24", frames="4:6", dry_run=True)
    assert any("color profile" in note for note in movie.videos[0].notes)


def test_a_stopped_run_goes_on_and_makes_the_same_bytes(frames, tmp_path):
    calm, out = tmp_path / "calm" / "%d.png", tmp_path / "out" / "%d.png"
    lowtide.video(frames, calm, segment=2)
    due = bytes_of(calm.parent)
    with pytest.raises(Cancelled):
        lowtide.video(frames, out, segment=2, cancel=lambda: is_begun(out))
    assert not [one for one in out.parent.iterdir() if not one.name.startswith(".")]
    events = []
    item = lowtide.video(frames, out, segment=2, progress=events.append).videos[0]
    assert item.frames_resumed >= 2 and bytes_of(out.parent) == due
    read = [event for event in events if event.phase == "check"]
    assert read[-1].done == read[-1].total == 8


def test_files_that_changed_meanwhile_are_noticed(frames, tmp_path):
    out = tmp_path / "out" / "%d.png"
    with pytest.raises(Cancelled):
        lowtide.video(frames, out, segment=2, cancel=lambda: is_begun(out))
    Image.new("RGB", (48, 32), (9, 8, 7)).save(frames / "shot_0003.png")
    assert lowtide.video(frames, out, segment=2).videos[0].frames_resumed == 0
    middle = pixels(out.parent / "3.png")[8:-8, 8:-8]
    assert np.abs(middle - (9, 8, 7)).max() <= 3


def test_frames_named_by_a_run_that_was_killed_are_its_own(frames, tmp_path, monkeypatch):
    calm, out = tmp_path / "calm" / "%d.png", tmp_path / "out" / "%d.png"
    lowtide.video(frames, calm, segment=2)
    work, kept = segments_folder(out), tmp_path / "kept"
    link, count = os.link, []

    def stop_after_three(made, target):
        if made.parent == work and made.suffix == ".png" and target.parent != work:
            count.append(target)
            if len(count) == 4:
                shutil.copytree(work, kept)  # as a kill would leave it
                raise KeyboardInterrupt
        return link(made, target)

    monkeypatch.setattr(os, "link", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        lowtide.video(frames, out, segment=2)
    monkeypatch.undo()
    shutil.rmtree(work)
    kept.rename(work)
    assert len([one for one in out.parent.iterdir() if one.suffix == ".png"]) == 3
    assert lowtide.video(frames, out, segment=2).videos[0].frames_resumed == 8
    assert bytes_of(out.parent) == bytes_of(calm.parent)


def test_existing_frames_are_not_replaced_without_force(frames, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "shot_0007.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"shot_0007\.png already exists"):
        lowtide.video(frames, out)
    assert bytes_of(out) == {"shot_0007.png": b"mine"}
    lowtide.video(frames, out, frames="3:5")  # beside it
    assert (out / "shot_0007.png").read_bytes() == b"mine"
    lowtide.video(frames, out, force=True)
    assert pixels(out / "shot_0007.png").shape == (64, 96, 3)


def test_a_frame_that_another_program_makes_meanwhile_stays(frames, tmp_path):
    out = tmp_path / "out"

    def intrude(event):
        if event.phase == "check":
            (out / "shot_0006.png").write_bytes(b"mine")

    with pytest.raises(OutputError, match=r"shot_0006\.png"):
        lowtide.video(frames, out, progress=intrude)
    assert (out / "shot_0006.png").read_bytes() == b"mine"


def test_a_damaged_frame_is_refused_or_repeated(frames, tmp_path):
    whole = (frames / "shot_0006.png").read_bytes()
    (frames / "shot_0006.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(VideoError, match=r"shot_0006\.png: damaged"):
        lowtide.video(frames, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    item = lowtide.video(frames, tmp_path / "out", damaged="keep").videos[0]
    assert (item.frames_out, item.frames_repeated) == (8, 1)
    made = bytes_of(tmp_path / "out")
    assert made["shot_0006.png"] == made["shot_0005.png"]
    (frames / "shot_0003.png").write_bytes(b"no image")
    item = lowtide.video(frames, tmp_path / "first", damaged="keep").videos[0]
    made = bytes_of(tmp_path / "first")
    assert item.frames_repeated == 2 and made["shot_0003.png"] == made["shot_0004.png"]


def test_a_full_disk_and_a_second_run(frames, tmp_path, files_of_at_most):
    out, caught = tmp_path / "new" / "out", []
    with files_of_at_most(3000), pytest.raises(OutputError, match="disk is full"):
        lowtide.video(frames, out)
    assert not out.parent.exists()

    def once(event):
        if event.unit == "frames" and event.done == 1 and not caught:
            with pytest.raises(OutputError, match="another job is writing") as error:
                lowtide.video(frames, out)
            caught.append(error)

    lowtide.video(frames, out, progress=once)
    assert caught and len(bytes_of(out)) == 8


@pytest.mark.parametrize(
    ("source", "target", "options", "text"),
    [
        ("frames", "out.mp4", {}, "when frames are shown"),
        ("frames", "frames", {}, "is the input"),
        ("frames", "frames/shot_%04d.png", {"force": True}, "is the input"),
        ("frames", "out.png", {}, "one image"),
        ("in.mp4", "out.png", {}, "one image"),
        ("in.mp4", "out", {"format": "png", "codec": "x264"}, "--codec"),
        ("in.mp4", "out.mp4", {"format": "png"}, "contradicts"),
        ("in.mp4", "%d.png", {"format": "tif"}, "contradicts"),
        ("in.mp4", "out.mp4", {"fps": 24}, "--fps"),
        ("frames", "out", {"time": "0:1"}, "--time"),
        ("frames", "out", {"frames": "20:30"}, "frames 3 to 10"),
        ("frames", "out", {"suffix": "_x2"}, "--suffix"),
        ("frames", "out.gif", {"fps": 24}, "gif"),
        ("hdr.mkv", "%d.png", {}, "PQ"),
    ],
)
def test_what_cannot_be_done_is_said_before_work_starts(
    frames, tmp_path, source, target, options, text
):
    if source == "in.mp4":
        Clip(frames=2).write(tmp_path / source)
    if source == "hdr.mkv":
        Clip(frames=2, tags={"color_trc": 16, "color_primaries": 9, "colorspace": 9}).write(
            tmp_path / source
        )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=text):
        lowtide.video(tmp_path / source, tmp_path / target, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sequence_is_the_only_input(frames, tmp_path):
    for inputs in ([frames, frames], [frames, tmp_path / "in.mp4"]):
        with pytest.raises(UsageError, match="the only input"):
            lowtide.video(inputs, tmp_path / "out")
    with pytest.raises(VideoError, match="no such files"):
        lowtide.video(frames / "frame_%d.png", tmp_path / "out")


def test_a_folder_with_movies_is_one_of_movies(frames, tmp_path):
    Clip(frames=2).write(frames / "in.mp4")
    report = lowtide.video(frames, tmp_path / "out")
    assert [Path(one.output).name for one in report.videos] == ["in.mp4"]


def test_a_budget_holds_for_sequences(frames, tmp_path):
    memory = lowtide.video(frames, tmp_path / "out", budget="128MiB").videos[0].memory
    assert memory.peak_bytes <= memory.upper_bytes <= memory.budget_bytes
    planned = lowtide.video(frames, tmp_path / "dry", dry_run=True).videos[0]
    assert planned.status == "planned" and not (tmp_path / "dry").exists()
    assert json.loads(planned.model_dump_json())["pixel_format"] == "gbrp"
