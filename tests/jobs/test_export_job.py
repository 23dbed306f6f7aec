"""The export job: what is kept, what is refused, and what the report says."""

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import lowtide
from lowtide import ModelError, OutputError, UsageError
from lowtide.jobs.export import command as job
from lowtide.jobs.export.command import export_onnx
from lowtide.models import Model
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser
from lowtide.models.export import require_level_input
from lowtide.models.export.onnx_check import random_image

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def metadata(path):
    return {one.key: one.value for one in onnx.load(path).metadata_props}


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.onnx"


@pytest.fixture
def without(monkeypatch):
    """As if a package were not installed."""

    def missing(package):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *more: None if name == package else found(name, *more),
        )

    return missing


@pytest.fixture
def wrong(monkeypatch):
    """An exporter whose file adds something to every pixel."""
    write = job.write_onnx

    def alter(share):
        def altered(model, path, **options):
            network = write(model, path, **options)
            graph = onnx.load(path)
            (bias,) = (one for one in graph.graph.initializer if "conv_up.bias" in one.name)
            values = onnx.numpy_helper.to_array(bias)
            more = (values + share).astype(values.dtype)
            bias.CopyFrom(onnx.numpy_helper.from_array(more, bias.name))
            onnx.save(graph, path)
            return network

        monkeypatch.setattr(job, "write_onnx", altered)

    return alter


def test_the_report_says_what_was_compared(target):
    report = export_onnx("lowtide-x2", target)
    facts = lowtide.load("lowtide-x2").descriptor
    assert (report.model, report.architecture, report.scale) == ("lowtide-x2", "ParagonConv", 2)
    assert (report.parameters, report.opset, report.precision) == (facts.parameters, 23, "fp32")
    assert (report.file, report.file_bytes) == (str(target), target.stat().st_size)
    assert report.checked
    assert len(report.sizes) == 4
    model = lowtide.load("lowtide-x2")
    for one in report.sizes:
        with torch.inference_mode():
            largest = model.module(random_image(model, (one.height, one.width))).abs().max().item()
        assert 0 < one.difference < one.bound == 1e-4 * max(1.0, largest)
        assert one.psnr_db is None
    assert report.timing is not None
    assert report.timing.onnxruntime_seconds > 0 < report.timing.torch_seconds
    assert metadata(target)["lowtide.checked"] == "yes"
    assert list(target.parent.iterdir()) == [target]


def test_the_file_upscales_as_the_model_does(target):
    export_onnx("lowtide-x4", target, opset=20)
    session = runtime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    image = torch.rand(1, 3, 45, 23)
    (found,) = session.run(None, {"image": image.numpy()})
    expected = lowtide.load("lowtide-x4")(image)
    assert (torch.from_numpy(found).clamp(0, 1) - expected).abs().max() < 1e-5


def test_half_precision_reports_its_decibels(target):
    report = export_onnx("lowtide-x2", target, precision="fp16")
    for one in report.sizes:
        assert one.pytorch_difference is not None
        assert one.psnr_db is not None
        assert one.difference <= one.bound <= max(1e-4, 2 * one.pytorch_difference)
    assert "dB; PyTorch at this precision" in str(report)
    assert metadata(target)["lowtide.precision"] == "fp16"


def test_a_file_that_gives_something_else_is_not_kept(target, wrong):
    wrong(0.01)
    # Also with `unchecked`, which is for files that cannot be run.
    with pytest.raises(ModelError, match=r"at 50×33 .* by 0\.01 from PyTorch's, more than 0\.00"):
        export_onnx("lowtide-x2", target, unchecked=True)
    assert not list(target.parent.iterdir())


def test_rounding_may_be_a_share_of_large_pixels(target, monkeypatch):
    load = job.load

    def bright(name):
        model = load(name)
        for weight in model.module.conv_up.parameters():
            weight.data.mul_(1000)
        return model

    monkeypatch.setattr(job, "load", bright)
    for one in export_onnx("lowtide-x2", target).sizes:
        assert 1e-4 < one.difference < one.bound
        assert 0.01 < one.bound < 0.2


def test_a_file_that_was_there_stays_until_the_new_one_is_good(target, wrong):
    target.write_bytes(b"old")
    with pytest.raises(UsageError, match="already exists") as caught:
        export_onnx("lowtide-x2", target)
    assert caught.value.hint == "--force to replace it"
    assert export_onnx("lowtide-x2", target, force=True).checked
    good = target.read_bytes()
    wrong(0.01)
    with pytest.raises(ModelError):
        export_onnx("lowtide-x2", target, force=True)
    assert target.read_bytes() == good


def test_bf16_is_kept_only_unchecked(target):
    with pytest.raises(ModelError, match="cannot run it in bf16: Could not find") as caught:
        export_onnx("lowtide-x2", target, precision="bf16")
    assert "--unchecked" in (caught.value.hint or "")
    assert not list(target.parent.iterdir())
    report = export_onnx("lowtide-x2", target, precision="bf16", unchecked=True)
    assert not report.checked
    assert report.sizes == ()
    assert report.timing is None
    assert "checked    no: ONNX Runtime's CPU provider cannot run it in bf16" in str(report)
    assert metadata(target)["lowtide.checked"] == "no"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages_are_known_before_any_work(package, target, without):
    without(package)
    with pytest.raises(UsageError, match=f"needs {package}$") as caught:
        export_onnx("no such model", target)
    assert caught.value.hint.endswith("pip install '.[export]'")


def test_without_a_runtime_only_unchecked(target, without):
    without("onnxruntime")
    report = export_onnx("lowtide-x2", target, unchecked=True)
    assert report.unchecked_reason == "exporting to ONNX needs onnxruntime"
    assert metadata(target)["lowtide.checked"] == "no"


def test_places_that_cannot_be_written_to(tmp_path):
    with pytest.raises(OutputError, match="this is a folder"):
        export_onnx("lowtide-x2", tmp_path)
    with pytest.raises(OutputError, match="cannot be written"):
        export_onnx("lowtide-x2", tmp_path / "none" / "model.onnx")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        export_onnx("lowtide-x2", tmp_path / "file" / "model.onnx")
    with pytest.raises(UsageError, match=r"does not end in \.onnx"):
        export_onnx("lowtide-x2", tmp_path / "model.pt")


def test_a_full_disk(target, files_of_at_most):
    full = pytest.raises(OutputError, match=rf"{target.name}: the disk is full")
    with files_of_at_most(50_000), full as raised:
        export_onnx("lowtide-x2", target)
    assert "free some space" in raised.value.hint
    assert not list(target.parent.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="links as Unix has them")
def test_a_link_to_nowhere_is_somebodys_too(target):
    target.symlink_to("nowhere")
    with pytest.raises(UsageError, match="already exists"):
        export_onnx("lowtide-x2", target)
    assert target.is_symlink()


def test_a_result_of_another_shape_is_refused(target, monkeypatch):
    load = job.load

    def other(name):
        model = load(name)
        other = load("lowtide-x4")
        other.descriptor = replace(model.descriptor, scale=4)
        return other

    write = job.write_onnx
    monkeypatch.setattr(
        job, "write_onnx", lambda model, path, **options: write(load("lowtide-x2"), path, **options)
    )
    monkeypatch.setattr(job, "load", other)
    with pytest.raises(ModelError, match=r"returns \(1, 3, 66, 100\) for 50×33 pixels"):
        export_onnx("lowtide-x2", target)
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("name", ["lowtide-denoise", "lowtide-photo-denoise"])
def test_a_denoiser_has_its_level_as_an_input(name, tmp_path):
    target = tmp_path / "denoiser.onnx"
    report = export_onnx(name, target)
    assert report.checked and len({one.sigma for one in report.sizes}) == 4
    assert "at a sigma of" in str(report)
    model = lowtide.load(name)
    session = runtime.InferenceSession(target, providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["image", "sigma"]
    image = torch.rand(1, 3, 24, 72)  # in eights, as the model itself needs
    for sigma in (0.0, 0.03, 0.15):
        model.module.set_level(sigma)
        with torch.inference_mode():
            expected = model.module(image).numpy()
        inputs = {"image": image.numpy(), "sigma": np.array([sigma], np.float32)}
        (found,) = session.run(["result"], inputs)
        assert np.abs(found - expected).max() < 1e-5
    with pytest.raises(ModelError, match="image, sigma"):
        lowtide.load(target)


def test_denoisers_that_a_level_does_not_tell_all_are_refused_by_name(tmp_path):
    for precision in ("fp16", "bf16"):
        with pytest.raises(UsageError, match="lowtide-denoise is a denoiser") as error:
            export_onnx("lowtide-denoise", tmp_path / "a.onnx", precision=precision)
        assert error.value.hint == "--precision fp32"
    config = SlimUNetConfig(
        features=8, multipliers=(1, 2), noise_model="camera", noise_parameters=3
    )
    model = lowtide.load("lowtide-denoise")
    camera = Model(Denoiser(config), model.descriptor)
    with pytest.raises(ModelError, match="has 3 parameters besides the level"):
        require_level_input(camera, "fp32")
