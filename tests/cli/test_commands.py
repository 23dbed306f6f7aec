"""The commands when all is well: results on stdout, progress on stderr."""

import json
import os

import numpy as np
import pytest
import typer

from lowtide.cli.main import _normalize_option, app

HELP = [
    ([], ["upscale", "plan", "bench", "models", "doctor", "Exit codes"]),
    (["bench", "upscale"], ["--only", "--json", "conservative"]),
    (["upscale"], ["--budget", "--tile-batch-size", "--strip-metadata", "--json"]),
    (["plan"], ["upscale"]),
    (["plan", "upscale"], ["--budget", "writes no result", "--report"]),
    (["models"], ["bundled"]),
    (["doctor"], ["--json"]),
]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(lowtide, flag):
    for words, expected in HELP:
        result = lowtide(*words, flag)
        assert result.code == 0
        assert result.err == ""
        assert f"Usage: {' '.join(['lowtide', *words])}" in result.out
        assert all(text in result.out for text in expected), words


def _leaves(group, *words):
    for name in group.list_commands(None):
        command, path = group.commands[name], (*words, name)
        yield from _leaves(command, *path) if hasattr(command, "commands") else [(path, command)]


def test_help_of_a_group_says_of_each_command_what_its_own_help_begins_with(lowtide):
    shown = {(): lowtide("--help").out}
    for path, command in _leaves(typer.main.get_command(app)):
        page = shown.setdefault(path[:-1], lowtide(*path[:-1], "--help").out)
        first = command.help.split("\n\n")[0].split()
        assert " ".join(first) in " ".join(page.replace("│", " ").split()), path


@pytest.mark.parametrize("job", ["upscale", "denoise", "video"])
def test_a_plan_takes_every_option_of_its_job(job):
    """So that "plan" may stand before any command line."""
    commands = typer.main.get_command(app).commands
    of_job, of_plan = (
        {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        for command in (commands[job], commands["plan"].commands[job])
    )
    assert of_job - of_plan == {"--dry-run"}


@pytest.mark.parametrize("job", ["upscale", "denoise"])
def test_a_plan_refuses_what_its_run_would_refuse_to_write(lowtide, source, out, job):
    """And takes it by the same option."""
    words = job, source, "-o", out, "-b", "256MiB"
    out.write_bytes(b"of somebody else")
    refused = lowtide("plan", *words)
    assert refused.code == lowtide(*words).code == 2
    assert f"{out} already exists" in refused.err
    picture = out.with_name("detail.png")
    more = "--streams", "2", "--force", "--comparison", picture, "--json"
    assert lowtide("plan", *words, *more).json["images"][0]["status"] == "planned"
    picture.touch()
    refused = lowtide("plan", *words, "-o", out.with_name("new.png"), "--comparison", picture)
    assert f"{picture} already exists" in refused.err
    assert out.read_bytes() == b"of somebody else"
    assert not list(out.parent.glob("*.json"))


def test_the_report_of_a_plan_is_run_unchanged(lowtide, source, out):
    planned = lowtide("plan", "upscale", source, "-o", out, "--tile", 32, "--report", "--json")
    report = out.with_name("out.png.lowtide.json")
    image = json.loads(report.read_text())["image"]
    assert image["status"] == "planned"
    assert image["plan"] == planned.json["images"][0]["plan"]
    run = lowtide("upscale", source, "-o", out, "--plan", report, "--report", "--json")
    assert run.json["images"][0]["plan"]["strategy"] == image["plan"]["strategy"]
    assert json.loads(report.read_text())["image"]["status"] == "done"
    nowhere = lowtide("plan", "upscale", source, "--report")
    assert (nowhere.code, "no output is given" in nowhere.err) == (2, True)
    table = lowtide("plan", "upscale", source, "-o", out, "--report", "--all-devices")
    assert (table.code, "no --report" in table.err) == (2, True)


def test_a_plan_skips_what_its_run_would_skip(lowtide, source, tmp_path, save):
    folder = tmp_path / "in"
    save(folder / "a.png", np.full((12, 16, 3), 90, np.uint8))
    words = "upscale", folder, "-o", tmp_path / "out", "-b", "256MiB", "--json"
    assert lowtide("plan", *words).json["images"][0]["status"] == "planned"
    assert not (tmp_path / "out").exists()
    assert lowtide(*words).code == 0
    save(folder / "b.png", np.full((12, 16, 3), 90, np.uint8))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    planned = lowtide("plan", *words).json
    assert [one["status"] for one in planned["images"]] == ["skipped", "planned"]
    again = lowtide("plan", *words, "--force").json
    assert [one["status"] for one in again["images"]] == ["planned", "planned"]
    other = lowtide("plan", *words, "--tile", 32).json["images"]
    assert [one["status"] for one in other] == ["failed", "planned"]
    assert "was made with other settings" in other[0]["error"]
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_version(lowtide):
    import lowtide as package

    assert lowtide("--version").out == f"lowtide {package.__version__}\n"


def test_upscale(lowtide, source, out, read):
    result = lowtide("upscale", source, "-o", out, "--budget", "256MiB")
    assert result.code == 0
    assert read(out).shape == (120, 140, 3)
    assert f"{source} → {out}  70×60 → 140×120" in result.out
    for name in ("plan", "ledger", "accuracy", "precision", "memory", "time"):
        assert f"\n  {name:<10} " in result.out
    assert "exact: the whole image at once" in result.out
    assert "of 256 MiB" in result.out
    # Progress goes elsewhere, so that results can be piped.
    assert "loading lowtide-x2" in result.err
    assert "photo.png 100%" in result.err
    assert "%" not in result.out


@pytest.mark.parametrize("how", ["-q", "LOWTIDE_NO_PROGRESS"])
def test_silence(lowtide, source, out, monkeypatch, how):
    if how.startswith("LOWTIDE"):
        monkeypatch.setenv(how, "1")
    result = lowtide("upscale", source, "-o", out, *([how] if how.startswith("-") else []))
    assert result.err == ""
    assert "exact" in result.out


def test_json(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "--json", "-b", "256MiB")
    assert result.code == 0
    report = result.json
    assert report["schema_version"] == 2
    assert report["model"]["name"] == "lowtide-x2"
    image = report["images"][0]
    assert image["status"] == "done"
    assert image["plan"]["strategy"]["name"] == "whole"
    assert image["memory"]["budget_bytes"] == 256 << 20


def test_underscores_and_hyphens_are_one(lowtide, source, out):
    words = ["--tile=32", "--tile_batch_size", "2", "--tile_overlap=20", "--no_hann_blend"]
    result = lowtide("upscale", source, "-o", out, "--json", *words)
    plan = result.json["images"][0]["plan"]["strategy"]
    assert (plan["batch"], plan["overlap"], plan["blend"]) == (2, 20, 0)


def test_only_option_names_are_respelled(lowtide, tmp_path, save, monkeypatch):
    assert _normalize_option("--max_pixels=a_b") == "--max-pixels=a_b"
    assert _normalize_option("some_file.png") == "some_file.png"
    assert _normalize_option("-o") == "-o"
    # What follows a bare `--` is a file, whatever it looks like.
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "--odd_name.png", np.zeros((4, 4, 3), np.uint8))
    result = lowtide("upscale", "-o", "out.png", "--", "--odd_name.png")
    assert result.code == 0, result.err
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize("words", [["plan", "upscale"], ["upscale", "--dry-run"]], ids=str)
def test_plans_write_nothing(lowtide, source, tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lowtide(*words, source, "--tile", 32, "--budget", "256MiB")
    assert result.code == 0
    assert "tiled 32×32" in result.out
    assert "ledger" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]
    report = lowtide(*words, source, "-o", "x.png", "--json").json
    assert report["images"][0]["status"] == "planned"
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_a_device_without_a_plan_says_why(lowtide, source):
    """A GPU's context alone takes more than this."""
    words = ["plan", "upscale", source, "--all-devices", "--budget", "100MiB", "--json"]
    found = lowtide(*words).json["devices"]
    assert found.pop("cpu")["images"][0]["status"] == "planned"
    for failure in found.values():
        assert (failure["error"]["type"], failure["error"]["exit_code"]) == ("BudgetError", 3)
        assert failure["error"]["smallest_bytes"] > 100 << 20


def test_reports_are_written_next_to_results(lowtide, source, out, tmp_path):
    assert lowtide("upscale", source, "-o", out, "--report").code == 0
    kept = json.loads((tmp_path / "out.png.lowtide.json").read_text())
    assert kept["image"]["output"] == str(out)


def test_a_folder_twice(lowtide, source, tmp_path):
    folder = source.parent / "in"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(source.read_bytes())
    first = lowtide("upscale", folder, "-o", tmp_path / "out")
    assert "2 done in" in first.out
    assert "[1/2] a.png" in first.err
    second = lowtide("upscale", folder, "-o", tmp_path / "out")
    assert second.code == 0
    assert second.out.count("already finished, skipped") == 2
    assert "2 skipped in" in second.out


def test_skipped_files_of_a_folder_are_printed(lowtide, source, tmp_path):
    folder = source.parent / "in"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(source.read_bytes())
    for number in range(5):
        (folder / f"{number}.txt").write_text("words\n")
    shown = lowtide("upscale", folder, "-o", tmp_path / "out")
    named = ", ".join(str(folder / f"{number}.txt") for number in range(3))
    assert f"not used: a text file: {named} and 2 more\n" in shown.err
    assert "2 done, 5 not images in" in shown.out
    report = lowtide("upscale", folder, "-o", tmp_path / "out", "--json", "-q")
    assert report.err.startswith("not used: ")
    assert report.json["skipped_inputs"][4] == {
        "path": str(folder / "4.txt"),
        "reason": "a text file",
    }


def test_one_input_to_a_folder_and_to_a_file(lowtide, source, tmp_path, read):
    assert lowtide("upscale", source, "-o", f"{tmp_path}/out/", "--suffix", "_x2").code == 0
    assert read(tmp_path / "out" / "photo_x2.png").shape == (120, 140, 3)
    assert lowtide("upscale", source, "-o", tmp_path / "large").code == 0
    assert read(tmp_path / "large").shape == (120, 140, 3)


def test_one_pixel(lowtide, tmp_path, save, read, out):
    save(tmp_path / "one.png", np.full((1, 1, 3), 99, np.uint8))
    assert lowtide("upscale", tmp_path / "one.png", "-o", out).code == 0
    assert read(out).shape == (2, 2, 3)


def test_bounded_results_say_so(lowtide, source, out):
    result = lowtide("upscale", source, "-o", out, "--tile", 32, "--tile-overlap", 2)
    assert "bounded: the receptive field reaches 7 px" in result.out
    assert "against the whole image" in result.out


def test_models(lowtide):
    text = lowtide("models")
    assert text.code == 0
    assert "lowtide-x2: ParagonConv ×2" in text.out
    assert "lowtide-x4: ParagonConv ×4" in text.out
    assert text.err == ""
    listed = lowtide("models", "--json").json
    assert listed["schema_version"] == 2
    names = [model["name"] for model in listed["models"]]
    upscalers = ["lowtide-x2", "lowtide-x4", "lowtide-large-x2", "lowtide-large-x4"]
    photo = ["lowtide-photo-x2", "lowtide-photo-x4"]
    assert names == [*upscalers, *photo, "lowtide-denoise", "lowtide-photo-denoise"]


def test_models_say_what_they_are_for_and_how_fast_they_are(lowtide):
    text = lowtide("models").out
    assert "JPEGs of any quality from 30 on" in text and "s of CPU time a megapixel" in text
    for subject in ("faces", "anime", "old films"):
        assert f"{subject}" in text
    listed = lowtide("models", "--json").json
    seconds = {one["name"]: one["cpu_seconds_per_megapixel"] for one in listed["models"]}
    assert all(seconds.values()) and seconds["lowtide-x2"] < seconds["lowtide-large-x2"]
    assert all(one["page"].startswith("https://") and one["license"] for one in listed["published"])


def test_models_describes_a_file(lowtide, tmp_path):
    from lowtide.models.bundled import find_bundled

    (tmp_path / "mine.safetensors").write_bytes(find_bundled("lowtide-x4").path.read_bytes())
    row = lowtide("models", tmp_path / "mine.safetensors", "--json").json["models"][0]
    assert (row["name"], row["scale"], row["sha256"]) == (
        "mine",
        4,
        find_bundled("lowtide-x4").sha256,
    )


def test_doctor(lowtide, private_cache):
    text = lowtide("doctor")
    assert text.code == 0
    assert text.err == ""
    titles = "system", "devices", "precision", "disk", "extras", "attention"
    for word in (*titles, "cpu: ", "sdpa-math"):
        assert word in text.out
    facts = lowtide("doctor", "--json").json
    assert facts["schema_version"] == 2
    assert facts["devices"][0]["name"] == "cpu"
    assert facts["cache_folder"] == str(private_cache)
    assert {"lowtide", "torch", "libvips", "spandrel"} <= facts["versions"].keys()
    assert [one["name"] for one in facts["half_precision_on_cpu"]] == ["bf16", "fp16"]
    assert all(min(one["linear"], one["convolution"]) > 0 for one in facts["half_precision_on_cpu"])
    assert all(extra["complete"] or extra["fix"] for extra in facts["extras"])
    assert all(row["available"] or row["reason"] for row in facts["attention"])


def test_a_terminal_whose_encoding_lacks_characters(lowtide_process, source, out):
    """`→` and `×` are not in every encoding, which must not spoil a finished job."""
    done = lowtide_process(
        "upscale",
        source,
        "-o",
        out,
        "-b",
        "256MiB",
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LOWTIDE_NO_PROGRESS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "exact: the whole image at once" in done.stdout
    assert out.exists()


def test_upscale_says_which_model_and_why(lowtide, tmp_path):
    import pyvips
    import skimage.data

    picture = pyvips.Image.new_from_array(skimage.data.coffee()[:60, 200:280])
    picture.write_to_file(str(tmp_path / "a.jpg[Q=75]"))
    done = lowtide("upscale", tmp_path / "a.jpg", "-o", tmp_path / "b.png")
    line = "model      lowtide-photo-x2: a JPEG of quality about 75; -m takes another"
    assert done.code == 0 and line in done.out
