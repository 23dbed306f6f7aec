"""What people do wrong: one sentence, a hint where there is one, an exit code, no traceback."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide import ModelError


def complaint(result, code, words, hint=""):
    """Check an error as the command line must show it."""
    assert result.code == code, result.err
    assert result.out == ""
    lines = result.err.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    assert words in lines[at]
    assert "Traceback" not in result.err
    if hint:
        assert lines[at + 1 : at + 2] == [""]
        assert lines[at + 2].startswith("hint: ")
        assert hint in lines[at + 2]


NO_IMAGES = [
    (b"", "the file is empty (0 bytes)"),
    (b"hello, this is a letter\n" * 4, "this is a text file"),
    (b"<!DOCTYPE html><html>", "this is"),
    (b"\x89PNG\r\n\x1a\n" + bytes(30), "damaged or unsupported PNG"),
]


def test_files_that_are_no_images(lowtide, tmp_path, out):
    for content, words in NO_IMAGES:
        (tmp_path / "bad.png").write_bytes(content)
        complaint(lowtide("upscale", tmp_path / "bad.png", "-o", out), 2, words)
    assert not out.exists()


def test_a_truncated_image(lowtide, source, tmp_path, out):
    source.write_bytes(source.read_bytes()[:4000])
    complaint(lowtide("upscale", source, "-o", out), 2, "damaged or cut short after row")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_8_bits_are_for_exported_files(lowtide, source, out):
    for command in ("upscale", "denoise"):
        result = lowtide(command, source, "-o", out, "--precision", "int8")
        complaint(result, 2, "--precision int8 is not one of 'auto', 'fp32'", "lowtide export onnx")


def test_a_missing_file(lowtide, tmp_path, out):
    complaint(lowtide("upscale", tmp_path / "no.png", "-o", out), 2, "no such file")


def test_an_image_past_the_limit(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "--max-pixels", 10)
    complaint(result, 2, "4,200 pixels and the limit is 10", "--max-pixels 4200")


def test_a_misspelled_model(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "-m", "lowtide-x3")
    complaint(result, 2, "no model 'lowtide-x3'", "did you mean 'lowtide-x")
    complaint(lowtide("models", "lowtidex2"), 2, "no model", "did you mean 'lowtide-x2'?")


class Hostile:
    """Makes a file when it is unpickled by anything careless."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_hostile_model_does_not_run(lowtide, source, tmp_path, out):
    torch.save({"params": Hostile(tmp_path / "ran")}, tmp_path / "evil.pth")
    for words in (["upscale", source, "-o", out, "-m"], ["models"]):
        complaint(lowtide(*words, tmp_path / "evil.pth"), 2, "refused")
    assert not (tmp_path / "ran").exists()


def test_files_that_are_no_models(lowtide, source, tmp_path, out):
    for suffix in (".pth", ".safetensors"):
        (tmp_path / f"letter{suffix}").write_text("dear model")
        result = lowtide("upscale", source, "-o", out, "-m", tmp_path / f"letter{suffix}")
        complaint(result, 2, "letter")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "odd.pth")
    complaint(lowtide("upscale", source, "-o", out, "-m", tmp_path / "odd.pth"), 2, "odd.pth")


def test_targets_below_a_file(lowtide, source, tmp_path):
    (tmp_path / "file").write_text("a regular file")
    for name in ("photo.png/out.png", "photo.png/deep/out.png"):
        complaint(lowtide("upscale", source, "-o", tmp_path / name), 1, "cannot be written")
    for name in ("file", "file/below"):
        result = lowtide("upscale", source, source.parent / "*.png", "-o", tmp_path / name)
        complaint(result, 1, "cannot be written")


def test_one_name_for_several_results(lowtide, source, tmp_path, out):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(source.read_bytes())
    for inputs in ([source, tmp_path / "in" / "a.png"], [tmp_path / "in"]):
        result = lowtide("upscale", *inputs, "-o", out)
        folder = out.with_suffix("")
        complaint(result, 2, "names one file, and there may be several", f"-o {folder}")
    assert not out.exists()


def test_limits_of_a_format_are_known_before_a_model_is_measured(
    lowtide, tmp_path, save, monkeypatch
):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "nothing known"))
    wide = save(tmp_path / "wide.png", np.zeros((1, 33000, 3), np.uint8))
    elsewhere = ["plan", "upscale", "--device", "rtx3060-12gb"]
    for words in (["upscale"], ["plan", "upscale"], elsewhere):
        for name, side in (("a.jpg", "65,500"), ("a.webp", "16,383"), ("a.avif", "16,384")):
            result = lowtide(*words, wide, "-o", tmp_path / name)
            complaint(result, 1, f"holds at most {side} on a side", "write PNG or TIFF")
            assert "measuring" not in result.err


def test_an_existing_target(lowtide, source, out):
    out.write_text("precious")
    complaint(lowtide("upscale", source, "-o", out), 2, "already exists", "--force")
    assert out.read_text() == "precious"


REFUSED = [
    (["--scale", 2, "--width", 9], "--scale and --width/--height contradict"),
    (["--tile-auto", "--tile", 64], "--tile-auto and --tile contradict"),
    (["--strategy", "whole", "--tile", 64], "has no tiles"),
    (["--budget", "plenty"], "not a number of bytes"),
    (["--budget", "6"], "a run needs at least"),
    (["--budget", "900TiB"], "more than this machine has"),
    (["--device", "cuda:7"], "this machine has"),
    (["--format", "bmp"], "'bmp' names no image format"),
    (["--scale", 0], "--scale 0 has to be above 0"),
    (["--suffix", "_x2"], "a file's own name"),
    (["--jpeg-quality", 0], "--jpeg-quality 0"),
]


def test_options_that_make_no_sense(lowtide, source, out):
    for words, message in REFUSED:
        complaint(lowtide("upscale", source, "-o", out, *words), 2, message)


def test_words_that_are_no_options(lowtide, source):
    """These are typer's own messages; the code is the same."""
    for words in (["--sclae", "2"], ["--tile", "many"], ["--strategy", "fast"], []):
        result = lowtide("upscale", *([source, "-o", "x.png", *words] if words else []))
        assert result.code == 2
        assert result.out == ""
        assert "Usage: lowtide upscale" in result.err


def test_no_output(lowtide, source):
    complaint(lowtide("upscale", source), 2, "no output is given", "-o OUTPUT")


def test_no_plan_fits_and_the_hint_works(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "--budget", "2MiB")
    complaint(result, 3, "no plan fits in 2.00 MiB", "--budget ")
    hint = result.err.partition("hint: ")[2].split()
    assert lowtide("upscale", source, "-o", out, *hint).code == 0


@pytest.fixture
def two_sizes(tmp_path, save, photo):
    save(tmp_path / "in" / "a.png", photo[100:160, 200:270])
    save(tmp_path / "in" / "b.png", np.tile(photo, (3, 3, 1)))
    return tmp_path / "in"


def test_a_folder_that_does_not_fit_names_one_budget(lowtide, two_sizes, tmp_path):
    words = ["upscale", two_sizes, "-o", tmp_path / "out"]
    result = lowtide(*words, "--budget", "2MiB")
    assert result.code == 3
    assert "none of 2 images fits the budget" in result.err
    assert "hint" not in result.out and result.err.count("hint: --budget") == 1
    document = lowtide(*words, "--budget", "2MiB", "--json").json
    smallest = document["error"]["smallest_bytes"]
    each = [image["smallest_bytes"] for image in document["images"]]
    assert smallest == max(each) > min(each)
    assert lowtide(*words, "--budget", str(smallest)).code == 0


def test_an_image_that_does_not_fit_beside_one_that_does(lowtide, two_sizes, tmp_path):
    words = ["upscale", two_sizes, "-o", tmp_path / "out", "--strategy", "whole"]
    images = lowtide(*words, "--budget", "2MiB", "--json").json["images"]
    few, many = (image["smallest_bytes"] for image in images)
    result = lowtide(*words, "--budget", str((few + many) // 2))
    assert result.code == 4
    assert "1 of 2 images failed" in result.err
    assert f"hint: --budget {many >> 20}MiB" in result.err


def test_errors_as_json(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "--budget", "2MiB", "--json")
    assert result.code == 3
    assert result.json["schema_version"] == 2
    error = result.json["error"]
    assert error["type"] == "BudgetError"
    assert error["exit_code"] == 3
    assert f"--budget {error['smallest_bytes'] >> 20}MiB" == error["hint"]
    assert "error: " in result.err


FAILURES = [
    (["upscale"], "UsageError", "Missing argument"),
    (["upscale", "SOURCE"], "UsageError", "no output is given"),
    (["upscale", "SOURCE", "-o", "OUT", "--sclae", 2], "UsageError", "No such option"),
    (["upscale", "SOURCE", "-o", "OUT", "--tile", "many"], "UsageError", "'many' is not"),
    (["upscale", "no.png", "-o", "OUT"], "ImageError", "no such file"),
    (["plan", "upscale", "no.png"], "ImageError", "no such file"),
    (["plan", "upscale", "no.png", "--all-devices"], "ImageError", "no such file"),
    (["plan", "train", "no", "--device", "cpu"], "ModelError", "no"),
    (["bench", "upscale", "no.png"], "ImageError", "no such file"),
    (["export", "onnx", "lowtide-x2", "-o", "x.bin"], "UsageError", "end in .onnx"),
    (["models", "nothing"], "ModelError", "no model"),
    (["train", "sr"], "UsageError", "neither a configuration nor data"),
    (["train", "sr", "--example"], "UsageError", "YAML"),
    (["upscull"], "UsageError", "No such command"),
    (["doctor", "--fast"], "UsageError", "No such option"),
]


def test_every_failure_is_one_document(lowtide, source, out):
    for words, kind, message in FAILURES:
        named = {"SOURCE": source, "OUT": out}
        result = lowtide(*[named.get(str(word), word) for word in words], "--json")
        assert result.code == 2
        assert result.json["schema_version"] == 2
        error = result.json["error"]
        assert (error["type"], error["exit_code"]) == (kind, 2)
        assert message in error["message"]
        assert "hint" in error
        assert result.err


def test_a_fault_of_ours_is_a_document_before_its_traceback(source, out, monkeypatch, capsys):
    from lowtide.cli.main import main
    from lowtide.core import heap
    from lowtide.jobs.upscale import command as upscale

    def fault(*_given, **_settings):
        raise ArithmeticError("two and two are five")

    monkeypatch.setattr(heap, "tune_heap", lambda: False)
    monkeypatch.setattr(upscale, "upscale", fault)
    with pytest.raises(ArithmeticError):
        main(["upscale", str(source), "-o", str(out), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["message"]) == ("ArithmeticError", "two and two are five")


def test_a_process_without_memory_is_told_so(source, out, monkeypatch, capsys):
    from lowtide.cli.main import main
    from lowtide.core import heap
    from lowtide.jobs.upscale import command as upscale

    def fault(*_given, **_settings):
        raise MemoryError

    monkeypatch.setattr(heap, "tune_heap", lambda: False)
    monkeypatch.setattr(upscale, "upscale", fault)
    with pytest.raises(SystemExit) as ended:
        main(["upscale", str(source), "-o", str(out), "--json"])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert json.loads(said.out)["error"]["type"] == "OutOfMemoryError"
    assert said.err.startswith("error: this process got no more memory")


def test_some_of_a_batch_failed(lowtide, source, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    result = lowtide("upscale", source, tmp_path / "bad.png", "-o", tmp_path / "out")
    assert result.code == 4
    assert "bad.png: failed: " in result.out
    assert "1 done, 1 failed" in result.out
    result = lowtide("upscale", source, tmp_path / "bad.png", "-o", tmp_path / "out", "--json")
    assert result.code == 4
    assert [image["status"] for image in result.json["images"]] == ["skipped", "failed"]
    assert result.json["error"]["type"] == "BatchError"
    assert result.json["error"]["exit_code"] == 4


def test_debug_shows_where(source, out):
    from lowtide.cli.main import main

    for words in (["--debug", "upscale"], ["upscale", "--debug"]):
        with pytest.raises(ModelError):
            main([*words, str(source), "-o", str(out), "-m", "lowtide-x3"])


def test_control_c_in_this_process(lowtide, source, tmp_path, out, monkeypatch):
    from lowtide.cli import progress_bar

    def interrupt(self, moment):
        if moment.done:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress_bar.JobProgressPrinter, "__call__", interrupt)
    complaint(
        lowtide("upscale", source, "-o", out), 130, "interrupted", "run the same command again"
    )
    stopped = lowtide("upscale", source, "-o", out, "--json")
    assert stopped.code == stopped.json["error"]["exit_code"] == 130
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def _heeding():
    """What runs the tests may ignore the signal, which a process inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_a_real_control_c(tmp_path, save, photo):
    save(tmp_path / "in" / "photo.png", photo)
    words = ["upscale", tmp_path / "in", "-o", tmp_path / "out", "--tile", 16]
    command = [sys.executable, "-m", "lowtide", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=_heeding) as job:
        for line in job.stderr:
            if "%" in line:
                break
        time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=300)
    assert job.returncode == 130, err
    assert "error: interrupted" in err
    assert "Traceback" not in err
    assert out == ""
    assert not [path for path in (tmp_path / "out").rglob("*") if ".part" in path.name]


FULL = """
import resource, sys
from lowtide.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits files as Unix does")
def test_a_full_disk(source, tmp_path, out):
    command = [sys.executable, "-B", "-c", FULL, "upscale", str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "error: " in done.stderr
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is full")
@pytest.mark.parametrize("words", [["models", "--json"], ["train", "sr", "--example"]], ids=str)
def test_output_into_a_file_on_a_full_disk(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lowtide", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "error: standard output: the disk is full" in done.stderr
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
