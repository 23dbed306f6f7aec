"""A disk that is full meanwhile: errors that say so, a report of what is done, nothing half."""

import json
import subprocess
import sys

import numpy as np
import pytest

import lowtide
from lowtide import OutputError
from lowtide.jobs.engine.journal import JOURNAL_NAME
from support.image_folders import files_of, statuses

OPTIONS = {"budget": "256MiB", "tile": 32}


@pytest.fixture
def folder(tmp_path, save, photo):
    root = tmp_path / "in"
    save(root / "a.jpg", photo[:20, :30])
    save(root / "b.jpg", np.random.default_rng(0).integers(0, 255, (120, 120, 3), np.uint8))
    save(root / "c.jpg", photo[20:40, :30])
    return root


@pytest.fixture
def tiny(tmp_path, save, photo):
    """Pictures whose results are of fewer bytes than the first line of a journal."""
    root = tmp_path / "tiny"
    for name in "abc":
        save(root / f"{name}.webp", photo[:16, :16])
    return root


def upscale(source, target, **options):
    return lowtide.upscale(source, target, **{**OPTIONS, **options})


def test_images_that_fit_are_done_and_reported(folder, tmp_path, files_of_at_most):
    upscale(folder, tmp_path / "calm")
    out = tmp_path / "out"
    with files_of_at_most(20_000):
        report = upscale(folder, out)
    assert statuses(report) == ["done", "failed", "done"]
    assert "b.jpg: the disk is full" in report.failures[0].error
    assert "free some space" in report.failures[0].hint
    assert sorted(files_of(out)) == ["a.jpg", "c.jpg"]
    assert statuses(upscale(folder, out)) == ["skipped", "done", "skipped"]
    assert files_of(out) == files_of(tmp_path / "calm")


def test_a_journal_that_cannot_grow(tiny, tmp_path, files_of_at_most):
    """Wherever the disk is full in it, the job ends with a report, and the next one goes on."""
    calm = tmp_path / "calm"
    upscale(tiny, calm)
    records = (calm / JOURNAL_NAME).read_text().splitlines(keepends=True)
    pin, settings = map(len, records[:2])
    assert all(len(data) < pin for data in files_of(calm).values())
    seen = set()
    for most in (pin - 9, pin + 9, *range(pin + settings + 9, pin + settings + 900, 90)):
        out = tmp_path / f"out{most}"
        try:
            with files_of_at_most(most):
                report = upscale(tiny, out)
        except OutputError as error:
            assert most < pin
            assert f"{JOURNAL_NAME}: the disk is full" in error.message
            assert not out.exists()
            continue
        for image in report.images:
            noted = any("not recorded as finished" in event for event in image.events)
            seen.add((image.status, noted))
            assert image.status != "failed" or "the disk is full" in image.error
        done = [image.status == "done" for image in report.images]
        assert len(files_of(out)) == sum(done)
        again = upscale(tiny, out)
        assert statuses(again) == ["skipped" if one else "done" for one in done]
        assert files_of(out) == files_of(calm)
    assert seen == {("failed", False), ("done", False), ("done", True)}


def test_several_processes_whose_journal_cannot_grow(tiny, tmp_path, files_of_at_most):
    calm, out = tmp_path / "calm", tmp_path / "out"
    upscale(tiny, calm)
    pin = len((calm / JOURNAL_NAME).read_text().partition("\n")[0]) + 1
    with files_of_at_most(pin + 9):
        report = upscale(tiny, out, devices=("cpu", "cpu"))
    assert statuses(report) == ["failed"] * 3
    for image in report.failures:
        assert f"{JOURNAL_NAME}: the disk is full" in image.error
    assert files_of(out) == {}


def test_a_report_on_a_full_disk(tiny, tmp_path, files_of_at_most):
    upscale(tiny, tmp_path / "calm", sidecar=True)
    reports = list((tmp_path / "calm").glob("*.lowtide.json"))
    least, out = min(path.stat().st_size for path in reports), tmp_path / "out"
    with files_of_at_most(least - 600):
        report = upscale(tiny, out, sidecar=True)
        with pytest.raises(OutputError, match=r"alone\.webp\.lowtide\.json: the disk is full"):
            upscale(tiny / "a.webp", tmp_path / "alone.webp", sidecar=True)
    assert statuses(report) == ["failed"] * 3
    for image in report.failures:
        assert "its result was written" in image.error
        assert "lowtide.json: the disk is full" in image.error
    assert sorted(files_of(out)) == ["a.webp", "b.webp", "c.webp"]
    assert (tmp_path / "alone.webp").is_file()
    assert list(tmp_path.rglob("*.part")) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    try:
        done = subprocess.run(words, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(folder, tmp_path, save, photo, small_disk):
    save(folder / "b.jpg", photo)
    save(folder / "d.jpg", photo[40:60, :30])
    calm, out = tmp_path / "calm", small_disk / "out"
    lowtide.upscale(folder, calm, tile=64, budget="256MiB", format="png").raise_for_failures()
    words = [sys.executable, "-m", "lowtide", "upscale", str(folder), "-o", str(out), "--json"]
    # One after another: an image still being written would occupy space during the next.
    words += ["--tile", "64", "--budget", "256MiB", "--format", "png", "--streams", "1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    images = json.JSONDecoder().raw_decode(done.stdout)[0]["images"]
    assert [image["status"] for image in images] == ["done", "failed", "done", "done"]
    assert "b.png: the disk is full (No space left on device)" in images[1]["error"]
    assert "Traceback" not in done.stderr
    assert files_of(out) == {name: data for name, data in files_of(calm).items() if name != "b.png"}
