"""ONNX files by another provider than the CPU's, which this machine does not have."""

import warnings

import pytest

import lowtide
from lowtide.core.errors import ModelError, UsageError
from lowtide.models import onnx_providers
from lowtide.models.onnx_providers import Provider
from support.measured_costs import remember_onnx

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TENSORRT = "TensorrtExecutionProvider"
pytestmark = pytest.mark.skipif(
    TENSORRT in runtime.get_available_providers(), reason="this machine has TensorRT"
)


def upscale(source, target, model, **options):
    return lowtide.upscale(source, target, model=model, budget="256MiB", **options).images[0]


def test_without_tensorrt_it_says_what_there_is(tmp_path, source, onnx_x2):
    with pytest.raises(UsageError, match=rf"has no {TENSORRT}; it has .*CPU") as caught:
        upscale(source, tmp_path / "out.png", onnx_x2, provider="tensorrt")
    assert "onnxruntime-gpu" in caught.value.hint
    assert not (tmp_path / "out.png").exists()


def test_a_provider_that_cannot_be_set_up_is_not_passed_over(
    tmp_path, source, onnx_x2, monkeypatch
):
    """ONNX Runtime itself goes on without it."""
    monkeypatch.setattr(runtime, "get_available_providers", lambda: [TENSORRT])
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ModelError, match=r"by tensorrt: .*could not be set up"),
    ):
        upscale(source, tmp_path / "out.png", onnx_x2, provider="tensorrt")


def test_its_numbers_are_compared_with_the_cpus(tmp_path, source, onnx_x2, monkeypatch):
    remember_onnx(onnx_x2, provider="tensorrt")
    monkeypatch.setitem(onnx_providers._CHAINS, "tensorrt", ("CPUExecutionProvider",))
    plain = upscale(source, tmp_path / "plain.png", onnx_x2)
    assert plain.accuracy.precision_error is None
    for options in ({}, {"tile": 40}, {"self_ensemble": True, "tile": 40}):
        image = upscale(
            source, tmp_path / "out.png", onnx_x2, provider="tensorrt", force=True, **options
        )
        assert image.accuracy.precision_error.max_error == 0
        assert "run by tensorrt, whose memory on the GPU is not counted" in (
            image.accuracy.precision_note
        )
        if not options:
            assert (tmp_path / "out.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_engines_are_kept(tmp_path):
    (first, options), *others = Provider("tensorrt", tmp_path).providers
    assert first == TENSORRT
    assert options == {
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(tmp_path),
    }
    assert others == [("CUDAExecutionProvider", {}), ("CPUExecutionProvider", {})]


REFUSED = [
    ({"model": "lowtide-x2"}, "is for .onnx files"),
    ({"model": "a.onnx", "devices": "cpu,cpu"}, "several times at once"),
]


def test_options_that_tensorrt_excludes_are_refused(tmp_path, source):
    for options, match in REFUSED:
        with pytest.raises(UsageError, match=match):
            lowtide.upscale(source, tmp_path / "out.png", provider="tensorrt", **options)
