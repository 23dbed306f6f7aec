"""Video jobs that are stopped, by a caller or a full disk, and go on."""

import threading
from pathlib import Path

import pytest

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide import Cancelled, OutputError  # noqa: E402
from lowtide.jobs.clips.work import segments_folder  # noqa: E402
from support.video_clips import Clip, Sound  # noqa: E402


@pytest.fixture
def clip(tmp_path):
    """20 frames with sound."""
    return Clip(frames=20, sounds=(Sound(),)).write(tmp_path / "in.mkv")


def pictures(path: Path) -> list[bytes]:
    """Packets of the picture stream."""
    with av.open(str(path)) as container:
        return [bytes(one) for one in container.demux(video=0) if one.size]


def left_over(folder: Path, *expected: str) -> set[str]:
    return {one.name for one in folder.iterdir()} - set(expected)


def stop_after(clip: Path, target: Path, frames: int) -> None:
    """Run until so many frames are made, in segments of 4."""
    stop = threading.Event()

    def watch(event):
        if event.unit == "frames" and event.done == frames:
            stop.set()

    with pytest.raises(Cancelled):
        lowtide.video(clip, target, segment=4, progress=watch, cancel=stop)
    assert not target.exists()


def test_it_stops_within_a_frame_and_goes_on(clip, tmp_path):
    target, events = tmp_path / "out.mkv", []
    stop_after(clip, target, 10)
    assert left_over(tmp_path, "in.mkv") == {segments_folder(target).name}
    item = lowtide.video(clip, target, segment=4, progress=events.append).videos[0]
    assert item.frames_resumed in (4, 8)
    made, read = ([one for one in events if one.phase == phase] for phase in ("run", "check"))
    assert made[-1].total == 20 - item.frames_resumed and read[-1].done == 20
    assert not left_over(tmp_path, "in.mkv", "out.mkv")
    lowtide.video(clip, tmp_path / "calm.mkv", segment=4)
    assert pictures(target) == pictures(tmp_path / "calm.mkv")


def test_segments_of_other_settings_or_of_another_input_are_not_used(clip, tmp_path):
    target = tmp_path / "out.mkv"
    stop_after(clip, target, 10)
    planned = lowtide.video(clip, target, segment=4, quality=30, dry_run=True).videos[0]
    assert planned.frames_resumed == 0 and segments_folder(target).is_dir()
    Clip(frames=20, width=66).write(clip)
    item = lowtide.video(clip, target, segment=4).videos[0]
    assert (item.frames_resumed, item.out_width) == (0, 132)


def test_a_second_run_on_one_output_is_refused(clip, tmp_path):
    target, caught = tmp_path / "out.mkv", []

    def once(event):
        if event.unit == "frames" and event.done == 1 and not caught:
            with pytest.raises(OutputError, match=r"another job is writing .*out\.mkv") as error:
                lowtide.video(clip, target)
            caught.append(error)

    lowtide.video(clip, target, progress=once)
    assert caught and len(pictures(target)) == 20


def test_a_full_disk_leaves_no_output(clip, tmp_path, files_of_at_most):
    with files_of_at_most(3000), pytest.raises(OutputError, match="disk is full"):
        lowtide.video(clip, tmp_path / "out.mkv", codec="ffv1", segment=4)
    assert not left_over(tmp_path, "in.mkv")


def test_a_disk_that_is_full_at_the_end_costs_no_frame(tmp_path, files_of_at_most):
    clip, target = Clip(frames=20).write(tmp_path / "in.mp4"), tmp_path / "out.mp4"
    options = {"codec": "ffv1", "segment": 4}
    lowtide.video(clip, tmp_path / "calm.mkv", **options)
    limit = (tmp_path / "calm.mkv").stat().st_size * 2 // 3
    target = tmp_path / "out.mkv"
    with files_of_at_most(limit), pytest.raises(OutputError, match="disk is full"):
        lowtide.video(clip, target, **options)
    assert left_over(tmp_path, "in.mp4", "calm.mkv") == {segments_folder(target).name}
    item = lowtide.video(clip, target, **options).videos[0]
    assert (item.frames_resumed, item.fps) == (20, None)
    assert pictures(target) == pictures(tmp_path / "calm.mkv")
    assert not left_over(tmp_path, "in.mp4", "calm.mkv", "out.mkv")
