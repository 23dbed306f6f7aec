"""Folders: mirrored, resumed, locked; one bad image spoils nothing."""

import itertools
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import lowtide
from lowtide import Cancelled, ImageError, ModelError, OutputError, UsageError
from lowtide.jobs.engine.journal import JOURNAL_NAME, JobJournal
from lowtide.jobs.images import prepare
from support.image_folders import files_of, statuses

OPTIONS = {"budget": "256MiB", "tile": 32}


@pytest.fixture
def folder(tmp_path, save, crop):
    """Three pictures, one of them deeper, and a file that is none."""
    root = tmp_path / "in"
    save(root / "a.png", crop[:40, :50])
    save(root / "b.png", crop[:50, :40])
    save(root / "deep" / "er" / "c.jpg", crop[:60, :60])
    (root / "notes.txt").write_text("none of yours")
    return root


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def upscale(inputs, output, **options):
    return lowtide.upscale(inputs, output, **{**OPTIONS, **options})


def times_of(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in files_of(folder)}


def test_the_tree_is_mirrored(folder, out):
    report = upscale(folder, out)
    assert statuses(report) == ["done"] * 3
    assert sorted(files_of(out)) == ["a.png", "b.png", "deep/er/c.jpg"]
    assert report.failures == []


def test_patterns_and_files_and_folders_together(folder, out):
    upscale([str(folder / "*.png"), folder / "deep"], out)
    assert sorted(files_of(out)) == ["a.png", "b.png", "er/c.jpg"]


def test_one_broken_image_does_not_stop_the_others(folder, out):
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:2500])
    (folder / "empty.png").write_bytes(b"")
    report = upscale(folder, out)
    assert statuses(report) == ["done", "failed", "done", "failed"]
    broken, empty = report.failures
    assert broken.input == str(folder / "b.png")
    assert "damaged or cut short" in broken.error
    assert "empty" in empty.error
    assert sorted(files_of(out)) == ["a.png", "deep/er/c.jpg"]


def test_the_error_of_a_single_image_is_raised(folder, out):
    (folder / "b.png").write_bytes(b"")
    with pytest.raises(ImageError, match="empty"):
        upscale(folder / "b.png", out)


def test_finished_files_are_skipped(folder, out):
    upscale(folder, out)
    before = times_of(out)
    # Neither the budget nor its plan decides what the pixels are.
    assert statuses(upscale(folder, out, budget="300MiB")) == ["skipped"] * 3
    assert times_of(out) == before


def test_an_old_failure_is_tried_again(folder, out, save, crop):
    (folder / "b.png").write_bytes(b"")
    upscale(folder, out)
    save(folder / "b.png", crop[:30, :30])
    assert statuses(upscale(folder, out)) == ["skipped", "done", "skipped"]


def test_why_a_file_is_not_the_one_asked_for_is_said(folder, out, save, crop):
    upscale(folder, out)
    save(folder / "a.png", crop[:20, :20])
    with (out / "b.png").open("ab") as file:
        file.write(b"more")
    errors = {Path(one.input).name: one.error for one in upscale(folder, out).failures}
    assert "a.png was made from another input" in errors["a.png"]
    assert "b.png has changed since it was made" in errors["b.png"]


def test_other_settings_need_force(folder, out):
    upscale(folder, out)
    before = files_of(out)
    report = upscale(folder, out, scale=1.5)
    assert statuses(report) == ["failed"] * 3
    assert "with other settings: scale was None and is 1.5" in report.failures[0].error
    assert "--force" in report.failures[0].hint
    assert files_of(out) == before
    assert statuses(upscale(folder, out, scale=1.5, force=True)) == ["done"] * 3
    assert statuses(upscale(folder, out, scale=1.5)) == ["skipped"] * 3


def test_a_changed_input_needs_force_and_only_it_is_refused(folder, out, save, crop):
    upscale(folder, out)
    save(folder / "a.png", crop[20:60, :50])
    assert statuses(upscale(folder, out)) == ["failed", "skipped", "skipped"]
    upscale(folder / "a.png", out, force=True)
    assert statuses(upscale(folder, out)) == ["skipped"] * 3


def test_a_deleted_output_is_made_again(folder, out):
    upscale(folder, out)
    before = files_of(out)
    (out / "b.png").unlink()
    assert statuses(upscale(folder, out)) == ["skipped", "done", "skipped"]
    assert files_of(out) == before


def test_an_output_that_somebody_changed_is_refused(folder, out):
    """It may be somebody's retouching; only --force replaces it."""
    upscale(folder, out)
    changed = (out / "a.png").read_bytes() + b"retouched"
    (out / "a.png").write_bytes(changed)
    report = upscale(folder, out)
    assert statuses(report) == ["failed", "skipped", "skipped"]
    assert "changed since" in report.failures[0].error
    assert (out / "a.png").read_bytes() == changed
    assert statuses(upscale(folder, out, force=True)) == ["done"] * 3


def test_foreign_files_are_not_overwritten(folder, out):
    out.mkdir()
    (out / "a.png").write_text("somebody's")
    report = upscale(folder, out)
    assert statuses(report) == ["failed", "done", "done"]
    assert "already exists" in report.failures[0].error
    assert (out / "a.png").read_text() == "somebody's"
    assert statuses(upscale(folder, out, force=True)) == ["done"] * 3


def test_two_inputs_of_one_output(folder, out, save, crop):
    save(folder / "a.jpg", crop[:20, :20])
    with pytest.raises(UsageError, match="would both be written to"):
        upscale(folder, out, format="png")
    assert not out.exists()


def test_an_output_that_is_an_input(folder):
    before = files_of(folder)
    with pytest.raises(UsageError, match="this output is the input"):
        upscale(folder, folder)
    with pytest.raises(UsageError, match="this output is the input"):
        upscale(folder / "a.png", folder / "a.png", force=True)
    assert files_of(folder) == before


def test_results_inside_the_input_folder_are_no_inputs(folder):
    upscale(folder, folder / "results")
    assert statuses(upscale(folder, folder / "results")) == ["skipped"] * 3


@pytest.mark.parametrize("when", ["between images", "inside an image"])
def test_stopped_and_resumed_equals_undisturbed(folder, out, tmp_path, when):
    upscale(folder, tmp_path / "calm", sidecar=False)
    stop = threading.Event()

    def watch(moment):
        if moment.image == 2 and (when == "between images" or moment.done > 0):
            stop.set()

    with pytest.raises(Cancelled):
        upscale(folder, out, progress=watch, cancel=stop)
    assert sorted(files_of(out)) == ["a.png"]
    finished = times_of(out)
    assert statuses(upscale(folder, out)) == ["skipped", "done", "done"]
    assert finished.items() <= times_of(out).items()
    assert files_of(out) == files_of(tmp_path / "calm")


def test_a_resumed_folder_keeps_its_automatic_budget(folder, out):
    """Else a file made later could be planned, and so made, in another way."""
    (folder / "b.png").write_bytes(b"")
    first = upscale(folder, out, budget="50%")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    second = upscale(folder, out, budget="auto")
    made_first, made_later = first.images[0], second.images[1]
    assert made_first.plan.budget_bytes == made_later.plan.budget_bytes


def test_a_folder_that_was_refused_keeps_nothing(folder, out, monkeypatch):
    """Little memory is free, and then more: no file was made that later ones have to suit."""
    free = "lowtide.memory.budget.available_host_bytes"
    with monkeypatch.context() as low:
        low.setattr(free, lambda: 2 << 20)
        refused = upscale(folder, out, budget="auto")
    assert all("no plan fits" in image.error for image in refused.failures)
    assert statuses(refused) == ["failed"] * 3
    assert statuses(upscale(folder, out, budget="auto")) == ["done"] * 3


@pytest.mark.slow
def test_resident_bytes_of_a_model_are_pinned_when_a_folder_begins(
    folder, out, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))

    def ledger_mib(holds_mib, **options):
        loaded = (holds_mib << 20) + lowtide.load("lowtide-x2").descriptor.weight_bytes
        held = itertools.chain([0], itertools.repeat(loaded))
        monkeypatch.setattr(prepare._Monitor, "_resident_bytes", lambda self, **how: next(held))
        report = upscale(folder, out, model="lowtide-x2", **options)
        ledger = next(image.plan for image in report.images if image.plan is not None).ledger
        return next(row.value for row in ledger if row.name == "runtime") >> 20

    (folder / "b.png").write_bytes(b"")
    assert ledger_mib(7) == 7
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    assert ledger_mib(30) == 7
    assert ledger_mib(30, devices="cpu,cpu", force=True) == 7
    (out / JOURNAL_NAME).unlink()
    assert ledger_mib(30, devices="cpu,cpu", force=True) == 30
    # About the same is the same, so that a plan does not hang on it.
    (out / JOURNAL_NAME).unlink()
    assert ledger_mib(33, force=True) == 30


def test_the_journal_survives_a_torn_last_line(folder, out):
    upscale(folder, out)
    journal = out / JOURNAL_NAME
    journal.write_text(journal.read_text()[:-40])
    statuses_now = statuses(upscale(folder, out))
    # The image whose record was torn is there but unknown, so it is left alone.
    assert sorted(statuses_now) == ["failed", "skipped", "skipped"]


def test_a_second_job_on_a_folder_has_to_wait(folder, out):
    with JobJournal(out), pytest.raises(OutputError, match="another job is writing into"):
        upscale(folder, out)
    assert statuses(upscale(folder, out)) == ["done"] * 3


def test_remains_of_killed_runs_are_removed(folder, out):
    """Those that the folder's own journal names, and no other file that is called like them."""
    with JobJournal(out) as journal:
        stale = [journal.new_part(out / name) for name in ("a.png", "deep/a.png.lowtide.json")]
        theirs = [out / ".a.png.lowtide.part", out / "deep" / ".x.lowtide.part"]
        for path in stale + theirs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
    upscale(folder, out)
    assert all(path.read_bytes() == b"half" for path in theirs)
    made = {name for name in files_of(out) if not name.endswith(".part")}
    assert made == {"a.png", "b.png", "deep/er/c.jpg"}
    assert files_of(out).keys() - made == {path.relative_to(out).as_posix() for path in theirs}


@pytest.mark.parametrize("entry", ["device_bytes", "measured"])
def test_a_damaged_pinned_value_is_measured_again(folder, out, entry):
    upscale(folder, out)
    expected = files_of(out)
    (out / "b.png").unlink()
    pin, *others = (out / JOURNAL_NAME).read_text().splitlines()
    record = json.loads(pin)
    record["pin"][entry] = {"damaged": "so"}
    (out / JOURNAL_NAME).write_text("\n".join([json.dumps(record), *others, ""]))
    assert statuses(upscale(folder, out)) == ["skipped", "done", "skipped"]
    assert files_of(out) == expected


def test_a_file_that_came_meanwhile_is_left_alone(folder, out, tmp_path):
    """Somebody else's, written while the picture was computed."""

    def plant(moment):
        for path in (out / "b.png", tmp_path / "alone.png"):
            if moment.phase == "run" and moment.name == "b.png":
                path.write_text("theirs")

    report = upscale(folder, out, progress=plant)
    assert statuses(report) == ["done", "failed", "done"]
    assert "b.png already exists" in report.failures[0].error
    (tmp_path / "alone.png").unlink()
    with pytest.raises(UsageError, match="already exists"):
        upscale(folder / "b.png", tmp_path / "alone.png", progress=plant)
    for path in (out / "b.png", tmp_path / "alone.png"):
        assert path.read_text() == "theirs"
    assert not list(tmp_path.rglob("*.part"))
    assert statuses(upscale(folder, out, force=True)) == ["done"] * 3


@pytest.mark.skipif(sys.platform == "win32", reason="links as Unix has them")
def test_links_are_not_written_through(folder, out, tmp_path):
    theirs = tmp_path / "theirs.png"
    theirs.write_text("theirs")
    out.mkdir()
    (out / "a.png").symlink_to(theirs)
    (out / "b.png").symlink_to("nowhere")
    report = upscale(folder, out)
    assert statuses(report) == ["failed", "failed", "done"]
    assert all("already exists" in image.error for image in report.failures)
    assert statuses(upscale(folder, out, force=True)) == ["done"] * 3
    assert not (out / "a.png").is_symlink()
    assert not (out / "nowhere").exists()
    assert theirs.read_text() == "theirs"
    # A link to the folder of results is what its owner wants.
    (tmp_path / "link").symlink_to(out)
    assert statuses(upscale(folder, tmp_path / "link")) == ["skipped"] * 3


def test_reports_next_to_every_result(folder, out):
    upscale(folder, out, sidecar=True)
    assert {"a.png.lowtide.json", "deep/er/c.jpg.lowtide.json"} <= files_of(out).keys()
    assert statuses(upscale(folder, out, sidecar=True)) == ["skipped"] * 3


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(folder, tmp_path, name):
    (tmp_path / "file").write_text("a regular file")
    with pytest.raises(OutputError, match="cannot be written"):
        upscale(folder, tmp_path / name)


def test_a_job_that_cannot_begin_leaves_no_folder(folder, tmp_path):
    with pytest.raises(ModelError):
        upscale(folder, tmp_path / "new" / "out", model="lowtide-x3")
    assert not (tmp_path / "new").exists()


def test_a_plan_of_a_folder_lists_what_would_fail(folder, out):
    (folder / "b.png").write_bytes(b"")
    report = lowtide.plan(folder, out, **OPTIONS)
    assert statuses(report) == ["planned", "failed", "planned"]
    assert not out.exists()


def test_images_of_a_batch_are_numbered(folder, out):
    moments = []
    upscale(folder, out, progress=moments.append)
    running = [moment for moment in moments if moment.phase == "run"]
    assert list(dict.fromkeys((m.image, m.images, m.name) for m in running)) == [
        (1, 3, "a.png"),
        (2, 3, "b.png"),
        (3, 3, "c.jpg"),
    ]


def test_small_and_empty_images_in_one_folder(tmp_path, out, save):
    for height, width in ((1, 1), (1, 70), (33, 2)):
        save(tmp_path / "tiny" / f"{height}x{width}.png", np.full((height, width, 3), 90, np.uint8))
    assert statuses(upscale(tmp_path / "tiny", out)) == ["done"] * 3
