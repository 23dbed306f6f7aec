"""Upscaling with ONNX files: the files of PyTorch, within the budget, whole and in tiles."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import ModelError, UsageError
from lowtide.jobs.upscale.report import UpscaleReport
from lowtide.models import Model, SizeRule
from support.image_folders import files_of
from support.measured_costs import remember_onnx

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from lowtide.models.loaded_model import SelfEnsemble
from support.onnx_files import conv_file, exported

MIB = 1 << 20


@pytest.fixture(scope="module")
def x2(onnx_x2):
    """The bundled model as an ONNX file, of which costs are known."""
    remember_onnx(onnx_x2)
    return onnx_x2


def upscale(source, target, model, **options):
    report = lowtide.upscale(source, target, model=model, **{"budget": "256MiB", **options})
    return report.images[0]


def apart(a, b):
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int)).max()


@pytest.mark.parametrize(
    ("options", "tiles"),
    [({"strategy": "whole"}, 1), ({"tile": 40}, 16)],
)
def test_the_file_is_pytorchs(options, tiles, tmp_path, save, read, crop, expected, x2):
    array = crop[:99, :117]
    source = save(tmp_path / "in.png", array)
    image = upscale(source, tmp_path / "out.png", x2, accuracy="exact", **options)
    assert (image.plan.strategy.tiles, image.accuracy.execution) == (tiles, "exact")
    assert apart(read(tmp_path / "out.png"), expected(array)) <= 1
    assert image.memory.within_budget


@pytest.mark.parametrize("bands", [1, 4])
def test_gray_and_opacity_go_through_a_color_model(bands, tmp_path, save, read, crop, x2):
    array = np.concatenate([crop, crop[..., :1] // 2 + 100], 2)[:50, :61]
    array = array[..., :bands] if bands != 2 else array[..., [0, 3]]
    source = save(tmp_path / "in.png", array)
    made = []
    for model in (x2, "lowtide-x2"):
        upscale(source, tmp_path / "out.png", model, force=True)
        made.append(read(tmp_path / "out.png"))
    assert made[0].shape == (100, 122, bands)
    assert apart(*made) <= 1


def test_a_gray_model(tmp_path, save, read, crop):
    model = conv_file(tmp_path / "gray.onnx", 1)
    remember_onnx(model, reach=1)
    image = upscale(save(tmp_path / "in.png", crop[:40, :50]), tmp_path / "out.png", model)
    assert image.accuracy.execution == "exact"
    assert read(tmp_path / "out.png").shape == (40, 50, 3)


def test_sizes_off_the_grid(tmp_path, save, read, crop):
    torch.manual_seed(0)
    network = nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(48, 192, 1), nn.PixelShuffle(8))
    facts = replace(lowtide.load("lowtide-x2").descriptor, size=SizeRule(multiple_of=4))
    model = exported(Model(network, facts), tmp_path / "blocks.onnx", labeled=False)
    remember_onnx(model, reach=4)
    array = crop[:43, :57]
    source = save(tmp_path / "in.png", array)
    image = upscale(source, tmp_path / "out.png", model, tile=24, accuracy="exact")
    assert (image.plan.image.align, image.plan.image.padded_size) == (4, (44, 60))
    assert image.plan.strategy.tiles > 1
    given = torch.from_numpy(array / np.float32(255)).permute(2, 0, 1)[None]
    wanted = lowtide.load(model)(given)[0].permute(1, 2, 0).numpy() * 255
    assert apart(read(tmp_path / "out.png"), np.rint(wanted)) <= 1


def test_the_budget_is_kept_and_foretold(tmp_path, save, photo, x2):
    """Of a file that was never run here, in a process that did nothing before.

    The heap of one that did has room already, and the run is seen to take less than it does.
    """
    source = save(tmp_path / "in.png", photo)
    words = ["upscale", source, "-o", tmp_path / "out.png", "--model", x2, "--budget", "80MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, words), "--json"],
        env={**os.environ, "LOWTIDE_CACHE": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
        text=True,
    )
    (image,) = UpscaleReport.model_validate_json(done.stdout).images
    memory = image.memory
    assert (image.accuracy.execution, image.plan.strategy.name) == ("exact", "tiled")
    assert memory.within_budget
    assert memory.peak_bytes <= memory.upper_bytes <= 80 * MIB
    assert abs(memory.peak_bytes - memory.predicted_bytes) < 12 * MIB
    # What the runtime holds is not left out because PyTorch does not see it.
    (live,) = [row.value for row in memory.ledger if row.name.startswith("live")]
    assert 200 * image.plan.strategy.run_pixels < live < 700 * image.plan.strategy.run_pixels


def test_eight_views(tmp_path, source, read, crop, x2):
    upscale(source, tmp_path / "out.png", x2, self_ensemble=True, tile=48, accuracy="exact")
    plain = SelfEnsemble(lowtide.load("lowtide-x2").module)
    given = torch.from_numpy(crop / np.float32(255)).permute(2, 0, 1)[None]
    with torch.inference_mode():
        wanted = plain(given).clamp(0, 1)[0].permute(1, 2, 0).numpy() * 255
    assert apart(read(tmp_path / "out.png"), np.rint(wanted)) <= 1


@pytest.fixture
def both(x2):
    """The report and the files of one device and of two parts of it."""

    def run(given, folder):
        for devices in (None, "cpu,cpu"):
            out = folder / f"out-{devices}"
            report = lowtide.upscale(
                [given],
                out,
                model=x2,
                devices=devices,
                tile=48,
                accuracy="exact",
                budget="512MiB",
            )
            assert [image.status for image in report.images] == ["done"] * len(report.images)
            yield report, files_of(out)

    return run


def test_two_parts_of_the_processor(tmp_path, source, both):
    (_, one), (report, two) = both(source, tmp_path)
    assert one == two
    assert report.images[0].plan.strategy.device_count == 2
    assert report.versions["onnxruntime"]


@pytest.mark.slow
def test_two_processes(tmp_path, save, crop, both):
    for index in range(3):
        save(tmp_path / "in" / f"{index}.png", crop[index : 40 + index, :50])
    (_, one), (_, two) = both(tmp_path / "in", tmp_path)
    assert one == two


def test_what_does_not_reach_so_far_is_bounded(tmp_path, source, x2):
    image = upscale(source, tmp_path / "out.png", x2, tile=48, tile_overlap=2)
    assert image.accuracy.execution == "bounded"
    assert image.accuracy.execution_error is not None


def test_half_precision_is_told(tmp_path, source):
    model = conv_file(tmp_path / "half.onnx", kind=np.float16)
    remember_onnx(model, reach=1)
    image = upscale(source, tmp_path / "out.png", model)
    assert image.accuracy.precision == "fp32"
    assert image.accuracy.precision_note.startswith("with weights in fp16")


REFUSED = [
    ({"strategy": "streamed"}, "not run in bands of rows"),
    ({"compile": "on"}, "compiler"),
    ({"precision": "bf16"}, "not run in bf16"),
    ({"device": "cuda"}, "not run on cuda: that has not been verified"),
    ({"devices": "cuda:0,cuda:1"}, "on cuda:0"),
    ({"device": "rtx3060-12gb"}, "on rtx3060"),
]


def test_what_is_refused(tmp_path, source, x2):
    for options, words in REFUSED:
        for job in (lowtide.upscale, lowtide.plan):
            if job is lowtide.plan and "devices" in options:
                continue
            with pytest.raises(UsageError, match=words):
                job(source, tmp_path / "out.png", model=x2, **options)
    assert not (tmp_path / "out.png").exists()


def test_streaming_is_refused_with_a_reason_in_every_plan(tmp_path, source, x2):
    (image,) = lowtide.plan(source, tmp_path / "out.png", model=x2).images
    assert {one.title: one.reason for one in image.plan.refused}["streamed"] == (
        "ONNX Runtime runs the whole graph of a file"
    )


def test_a_file_that_is_no_model(tmp_path, source):
    model = conv_file(tmp_path / "fixed.onnx", given=(1, 3, 64, 64))
    with pytest.raises(ModelError, match="64×64 pixels and no others"):
        lowtide.upscale(source, tmp_path / "out.png", model=model)
