"""Images of a folder over several processes."""

import signal
from unittest import mock

import pytest
import torch

import lowtide
from lowtide import Cancelled, UsageError
from lowtide.jobs.engine import workers
from lowtide.jobs.images import job as image_job
from support.image_folders import files_of, statuses

OPTIONS = {"budget": "512MiB", "tile": 32}
TWO = "cpu,cpu"


@pytest.fixture
def folder(tmp_path, save, crop):
    root = tmp_path / "in"
    for index, name in enumerate("abcde"):
        save(root / f"{name}.png", crop[5 * index : 5 * index + 40, : 50 + index])
    return root


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    made, start = [], workers.WorkerPool._start

    def noted(self, device):
        start(self, device)
        made.append(self._running[-1].process)

    monkeypatch.setattr(workers.WorkerPool, "_start", noted)
    yield made
    assert all(process.poll() is not None for process in made)


def upscale(folder, out, **options):
    return lowtide.upscale(folder, out, **{**OPTIONS, **options})


def test_two_make_the_files_of_one(folder, tmp_path, started):
    (folder / "c.png").write_bytes(b"no picture")
    seen = []
    one = upscale(folder, tmp_path / "one")
    two = upscale(folder, tmp_path / "two", devices=TWO, progress=seen.append)
    assert len(started) == 2
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert statuses(two) == statuses(one) == ["done", "done", "failed", "done", "done"]
    assert "c.png" in two.failures[0].error
    assert two.device == TWO
    done = [image for image in two.images if image.status == "done"]
    # Half of the budget is each one's.
    assert all(image.memory.budget_bytes == 256 << 20 for image in done)
    assert all(image.memory.within_budget for image in done)
    assert {moment.image for moment in seen if moment.phase == "run"} == {1, 2, 4, 5}
    again = upscale(folder, tmp_path / "two", devices=TWO)
    assert statuses(again) == ["skipped", "skipped", "failed", "skipped", "skipped"]


def test_another_process_takes_what_a_dead_one_had(folder, tmp_path, started):
    killed = []

    def kill(moment):
        if moment.phase == "run" and not killed:
            killed.append(moment.image)
            started[0].send_signal(signal.SIGKILL)

    report = upscale(folder, tmp_path / "out", devices=TWO, progress=kill)
    assert killed
    assert statuses(report) == ["done"] * 5
    assert len(files_of(tmp_path / "out")) == 5
    assert not list((tmp_path / "out").glob(".*.part"))


@pytest.mark.slow
def test_an_image_that_ends_every_process_is_a_failure_and_the_others_are_done(
    folder, tmp_path, started
):
    def kill(moment):
        if moment.phase == "run" and moment.image == 2 and not moment.done:
            for process in started:
                process.send_signal(signal.SIGKILL)

    # One at a time in each, so that one other image at most is in a dead process's hands.
    report = upscale(folder, tmp_path / "out", devices=TWO, progress=kill, streams=1)
    assert report.images[1].status == "failed"
    assert "ended early (signal 9)" in report.images[1].error
    assert "--devices" in report.images[1].hint
    assert statuses(report).count("done") >= 3


def test_processes_that_cannot_begin_are_not_started_for_ever(
    folder, tmp_path, started, monkeypatch
):
    monkeypatch.setattr(workers, "_MAIN", "no_such_library:main")
    report = upscale(folder, tmp_path / "out", devices=TWO)
    assert len(started) <= 3
    assert statuses(report) == ["failed"] * 5
    assert all("exit code 1" in image.error for image in report.images)
    assert all("No module named 'no_such_library'" in image.error for image in report.images)


def test_a_stop_ends_all_processes(folder, tmp_path, started):
    seen = []
    with pytest.raises(Cancelled):
        upscale(
            folder,
            tmp_path / "out",
            devices=TWO,
            progress=seen.append,
            cancel=lambda: any(moment.phase == "run" for moment in seen),
        )
    assert len(started) == 2
    assert not list((tmp_path / "out").glob(".*.part"))
    assert statuses(upscale(folder, tmp_path / "out"))[-1] == "done"


def test_the_tiles_of_a_single_image_are_shared(folder, tmp_path, started):
    source, one, two = folder / "a.png", tmp_path / "one.png", tmp_path / "two.png"
    alone = upscale(source, one)
    with mock.patch.object(image_job, "execute_plan", wraps=image_job.execute_plan) as watched:
        both = upscale(source, two, devices=TWO)
    assert not started  # for tiles no process is
    assert [report.images[0].plan.strategy.device_count for report in (alone, both)] == [1, 2]
    assert both.device == TWO
    done = both.images[0]
    assert "on 2 devices" in done.plan.title
    assert done.memory.within_budget
    assert one.read_bytes() == two.read_bytes()
    # Each has a network of its own, of the same weights.
    (here, *_), others = watched.call_args.args, watched.call_args.kwargs["replicas"]
    assert [other.forward is here.forward for other in others] == [False]
    pairs = zip(here.forward.parameters(), others[0].forward.parameters(), strict=True)
    assert all(a is b for a, b in pairs)


def test_an_image_in_one_piece_runs_on_the_first_device(folder, tmp_path, started):
    threads = torch.get_num_threads()
    report = lowtide.upscale(
        folder / "a.png", tmp_path / "a.png", budget="512MiB", devices=TWO, strategy="whole"
    )
    assert report.images[0].plan.strategy.device_count == 1
    assert report.images[0].notes == [
        "run on cpu only: no plan with tiles on several devices was chosen"
    ]
    assert torch.get_num_threads() == threads


def test_lists_that_make_no_sense(folder, tmp_path):
    with pytest.raises(UsageError, match="contradict"):
        upscale(folder, tmp_path / "out", devices=TWO, device="cpu")
    with pytest.raises(UsageError, match="tpu"):
        upscale(folder, tmp_path / "out", devices="cpu,tpu")
    with pytest.raises(UsageError, match="CUDA devices"):
        upscale(folder, tmp_path / "out", devices="cuda:7,cuda:8")


def test_gpus_and_the_cpu_do_not_mix(monkeypatch, folder, tmp_path):
    monkeypatch.setattr("lowtide.jobs.engine.devices.resolve_device", lambda name: name)
    with pytest.raises(UsageError, match="cannot combine GPUs with the CPU"):
        upscale(folder, tmp_path / "out", devices=["cpu", "cuda:0"])
