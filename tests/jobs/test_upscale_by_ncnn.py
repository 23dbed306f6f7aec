"""`lowtide upscale --runtime ncnn`: the same pictures without PyTorch, within the budget."""

import json
import subprocess
import sys

import numpy as np
import pytest
import pyvips
from safetensors.numpy import load_file, save_file

import lowtide
from lowtide import BudgetError, ModelError, UsageError
from lowtide.models.bundled import find_bundled
from lowtide.models.lowtide_files import read_metadata

# What runs a command in this process and then says what it loaded.
_COMMAND = """
import sys
from lowtide.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print("torch" in sys.modules, file=sys.stderr)
"""


def picture(path, height=90, width=130, channels=3):
    generator = np.random.default_rng(1)
    smooth = np.cumsum(generator.normal(size=(height, width, channels)), axis=1)
    values = (128 + 8 * smooth).clip(0, 255).astype(np.uint8)
    pyvips.Image.new_from_array(values).write_to_file(str(path))
    return path


def pixels(path):
    return pyvips.Image.new_from_file(str(path)).numpy().astype(int)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_equals_pytorch_to_one_level(tmp_path, channels):
    source, made = picture(tmp_path / "in.png", channels=channels), {}
    for runtime in ("torch", "ncnn"):
        target = tmp_path / f"{runtime}.png"
        report = lowtide.upscale(source, target, runtime=runtime)
        assert report.images[0].accuracy.execution == "exact"
        assert runtime in report.versions
        made[runtime] = pixels(target)
    difference = abs(made["torch"] - made["ncnn"])
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_tiles_equal_the_whole_picture(tmp_path):
    source = picture(tmp_path / "in.png", 150, 200)
    whole, tiled = tmp_path / "whole.png", tmp_path / "tiled.png"
    lowtide.upscale(source, whole, runtime="ncnn", strategy="whole")
    report = lowtide.upscale(source, tiled, runtime="ncnn", strategy="tiled", tile=64)
    assert report.images[0].plan.strategy.tiles > 1
    difference = abs(pixels(whole) - pixels(tiled))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_pytorch_is_never_loaded(tmp_path):
    source, target = picture(tmp_path / "in.png"), tmp_path / "out.png"
    words = ["upscale", source, "-o", target, "--runtime", "ncnn", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"
    report = json.loads(done.stdout)
    assert "torch" not in report["versions"]
    assert target.is_file()


def test_keeps_a_small_budget(tmp_path):
    source, target = picture(tmp_path / "in.png", 600, 800), tmp_path / "out.png"
    report = lowtide.upscale(source, target, runtime="ncnn", budget="96MiB")
    image = report.images[0]
    assert image.memory.peak_bytes <= 96 << 20
    assert image.plan.strategy.tiles > 1
    with pytest.raises(BudgetError) as refused:
        lowtide.upscale(source, tmp_path / "no.png", runtime="ncnn", budget="16MiB")
    again = lowtide.upscale(
        source, tmp_path / "yes.png", runtime="ncnn", budget=refused.value.smallest
    )
    assert again.images[0].memory.peak_bytes <= refused.value.smallest


def test_a_folder_is_done_again_by_another_runtime(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png"):
        picture(tmp_path / "in" / name)
    again = {"runtime": "ncnn", "device": "cpu"}
    first = lowtide.upscale(tmp_path / "in", tmp_path / "out", **again)
    assert [image.status for image in first.images] == ["done", "done"]
    second = lowtide.upscale(tmp_path / "in", tmp_path / "out", **again)
    assert {image.status for image in second.images} == {"skipped"}
    kept = lowtide.upscale(tmp_path / "in", tmp_path / "out", runtime="torch")
    assert all("made with other settings" in image.error for image in kept.images)
    other = lowtide.upscale(tmp_path / "in", tmp_path / "out", runtime="torch", force=True)
    assert {image.status for image in other.images} == {"done"}


def damaged(tensors, how):
    """Change tensors of an upscaler's file in one way."""
    if how == "one is missing":
        del tensors["body.0.bias"]
    elif how == "one too many":
        tensors["body.9.bias"] = tensors["body.0.bias"]
    elif how == "fewer channels":
        tensors["body.0.weight"] = np.ascontiguousarray(tensors["body.0.weight"][:, :4])
    elif how == "a longer bias":
        tensors["body.0.bias"] = np.zeros(99, np.float32)
    else:
        tensors["body.0.bias"][0] = np.nan
    return tensors


@pytest.mark.parametrize(
    "how", ["one is missing", "one too many", "fewer channels", "a longer bias", "not finite"]
)
def test_a_damaged_file_is_refused(tmp_path, how):
    """ncnn itself would read whatever lies beyond its arrays."""
    path = find_bundled("lowtide-x2").path
    model, source = tmp_path / "own.safetensors", picture(tmp_path / "in.png")
    save_file(damaged(load_file(path), how), model, read_metadata(path))
    with pytest.raises(ModelError, match=r"do not fit its metadata|NaN or infinite"):
        lowtide.upscale(source, tmp_path / "out.png", model=model, runtime="ncnn")
    save_file(load_file(path), model, read_metadata(path))
    lowtide.upscale(source, tmp_path / "out.png", model=model, runtime="ncnn")


def test_two_workers_give_the_same_files(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png"):
        picture(tmp_path / "in" / name)
    lowtide.upscale(tmp_path / "in", tmp_path / "one", runtime="ncnn")
    lowtide.upscale(tmp_path / "in", tmp_path / "two", runtime="ncnn", devices="cpu,cpu")
    for name in ("a.png", "b.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_plan_says_what_the_run_does(tmp_path):
    source, target = picture(tmp_path / "in.png"), tmp_path / "out.png"
    planned = lowtide.plan(source, target, runtime="ncnn").images[0]
    done = lowtide.upscale(source, target, runtime="ncnn").images[0]
    assert planned.plan.strategy == done.plan.strategy


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"denoise": "auto"}, "--denoise"),
        ({"precision": "bf16"}, "--precision bf16"),
        ({"strategy": "streamed"}, "--strategy streamed"),
        ({"device": "cuda:0"}, "--device cuda:0"),
        ({"compile": "on"}, "--compile on"),
        ({"self_ensemble": True}, "--self-ensemble"),
    ],
)
def test_what_needs_pytorch_is_refused_by_name(tmp_path, settings, named):
    source = picture(tmp_path / "in.png")
    with pytest.raises(UsageError, match=named) as refused:
        lowtide.upscale(source, tmp_path / "out.png", runtime="ncnn", **settings)
    assert "--runtime torch" in refused.value.hint
