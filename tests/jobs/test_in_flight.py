"""Images of a folder that are written while the next is computed."""

import threading

import pytest

import lowtide
from lowtide import Cancelled, OutputError
from lowtide.media import AsyncSink, ImageSink
from support.image_folders import files_of, statuses

OPTIONS = {"budget": "256MiB", "tile": 32}


@pytest.fixture
def folder(tmp_path, save, crop):
    root = tmp_path / "in"
    for index, name in enumerate("abcd"):
        save(root / f"{name}.png", crop[10 * index : 10 * index + 40, : 50 + index])
    return root


def upscale(folder, out, **options):
    return lowtide.upscale(folder, out, **{**OPTIONS, **options})


@pytest.mark.parametrize("streams", [2, 16])
def test_the_files_are_those_of_one_after_another(folder, tmp_path, streams):
    one = upscale(folder, tmp_path / "one", streams=1)
    more = upscale(folder, tmp_path / "more", streams=streams)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "more")
    names = [image.input for image in more.images]
    assert names == [image.input for image in one.images] == sorted(names)
    again = upscale(folder, tmp_path / "more", streams=streams)
    assert statuses(again) == ["skipped"] * 4


@pytest.mark.parametrize("streams", [1, 3])
def test_the_number_of_images_in_flight(folder, tmp_path, monkeypatch, streams):
    """Files that do not get ready hold up no more images than asked for."""
    gate, begun, most = threading.Event(), [], []
    finish, write = ImageSink.finish, ImageSink.__init__

    def waiting(self):
        gate.wait(20)
        finish(self)

    def opened(self, *given):
        begun.append(self)
        most.append(sum(not one._finished for one in begun))
        if len(begun) == streams:
            gate.set()
        write(self, *given)

    monkeypatch.setattr(ImageSink, "finish", waiting)
    monkeypatch.setattr(ImageSink, "__init__", opened)
    monkeypatch.setattr(ImageSink, "_finished", False, raising=False)
    upscale(folder, tmp_path / "out", streams=streams)
    assert max(most) == streams


def test_reports_count_images_written_meanwhile(folder, tmp_path):
    report = upscale(folder, tmp_path / "out", streams=2)
    rows = [{row.name: row for row in image.memory.ledger} for image in report.images]
    assert "other images being written" not in rows[0]
    for image, ledger in zip(report.images[1:], rows[1:], strict=True):
        others = ledger["other images being written"]
        assert others.upper >= 80 * 100 * 3
        assert image.memory.predicted_bytes == image.plan.predicted_bytes + others.value
        assert image.memory.upper_bytes == image.plan.upper_bytes + others.upper
    assert all(image.memory.within_budget for image in report.images)


@pytest.mark.own_process
def test_an_image_that_does_not_fit_with_others_waits(folder, tmp_path, monkeypatch):
    """With a budget of just one image's plan, one is written before the next begins."""
    needed = max(
        image.plan.upper_bytes
        for image in lowtide.plan(folder, tmp_path / "none", **OPTIONS).images
    )

    def never(self, sink, most):
        raise AssertionError("rows wait that have no room")

    monkeypatch.setattr(AsyncSink, "__init__", never)
    report = upscale(folder, tmp_path / "out", budget=needed)
    assert statuses(report) == ["done"] * 4
    names = {row.name for image in report.images for row in image.memory.ledger}
    assert "other images being written" not in names


def test_a_file_that_cannot_be_finished_is_one_failure(folder, tmp_path, monkeypatch):
    finish = ImageSink.finish

    def sometimes(self):
        if self._path.name == "b.png":
            raise OutputError(f"{self._path}: the disk is full")
        finish(self)

    monkeypatch.setattr(ImageSink, "finish", sometimes)
    report = upscale(folder, tmp_path / "out")
    assert statuses(report) == ["done", "failed", "done", "done"]
    assert "full" in report.failures[0].error
    assert sorted(files_of(tmp_path / "out")) == ["a.png", "c.png", "d.png"]
    monkeypatch.undo()
    again = upscale(folder, tmp_path / "out")
    assert statuses(again) == ["skipped", "done", "skipped", "skipped"]


def test_memory_that_runs_out_while_a_file_is_finished_means_another_try(
    folder, tmp_path, monkeypatch, save, photo
):
    save(folder / "b.png", photo[:256, :300])  # large enough for more plans than one
    finish, failed = ImageSink.finish, []

    def once(self):
        if self._path.name == "b.png" and not failed:
            failed.append(True)
            raise MemoryError
        finish(self)

    monkeypatch.setattr(ImageSink, "finish", once)
    report = upscale(folder, tmp_path / "out", tile=None, accuracy="bounded")
    assert failed
    assert statuses(report) == ["done"] * 4
    assert "replanned" in report.images[1].events[0]
    assert sorted(files_of(tmp_path / "out")) == ["a.png", "b.png", "c.png", "d.png"]


def test_a_given_plan_is_replanned_when_finishing_runs_out_of_memory(
    tmp_path, monkeypatch, save, photo
):
    """It had no others in flight to wait for."""
    source = save(tmp_path / "b.png", photo[:256, :300])
    kept = tmp_path / "plan.json"
    kept.write_text(lowtide.plan(source, tmp_path / "b2.png", budget="256MiB").model_dump_json())
    finish, failed = ImageSink.finish, []

    def once(self):
        if not failed:
            failed.append(True)
            raise MemoryError
        finish(self)

    monkeypatch.setattr(ImageSink, "finish", once)
    report = lowtide.upscale(source, tmp_path / "b2.png", budget="256MiB", plan_file=kept)
    assert "replanned" in report.images[0].events[0]
    assert (tmp_path / "b2.png").exists()


def test_a_stop_loses_nothing_that_was_computed(folder, tmp_path):
    stop, out = threading.Event(), tmp_path / "out"

    def third(moment):
        if moment.phase == "run" and moment.image == 3:
            stop.set()

    with pytest.raises(Cancelled):
        upscale(folder, out, progress=third, cancel=stop)
    assert sorted(files_of(out)) == ["a.png", "b.png"]
    report = upscale(folder, out)
    assert statuses(report) == ["skipped", "skipped", "done", "done"]


def test_an_interrupt_leaves_no_part_behind(folder, tmp_path):
    out = tmp_path / "out"

    def third(moment):
        if moment.phase == "run" and moment.image == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upscale(folder, out, progress=third)
    assert not list(out.glob(".*.part"))
    assert set(files_of(out)) <= {"a.png", "b.png"}
