"""Models as ONNX files: the same results at sizes that were not exported, and what is refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lowtide
from lowtide import ModelError, UsageError
from lowtide.attention.spatial import onnx_graph
from lowtide.models import Model, SizeRule, lowtide_files
from lowtide.models.export import (
    LARGEST_DIFFERENCE,
    CannotRunError,
    OnnxRunner,
    SizeCheck,
    checked_sizes,
    compare_fp32,
    write_metadata,
    write_onnx,
)
from lowtide.models.export.onnx_check import random_image
from lowtide.models.paragonsr2.config import TierConfig, VariantConfig
from lowtide.models.paragonsr2.tiers import ParagonTier
from lowtide.models.paragonsr2.variant import ParagonVariant

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SIZES = (33, 50), (5, 61), (70, 64), (1, 3)
SMALL = {"features": 16, "groups": 1, "blocks": 2}


@torch.no_grad()
def awake(network, share=0.5):
    """With every branch as strong as the way around it: before training most are next to nothing,
    and a file that lacks them would pass."""
    for name, weight in network.named_parameters():
        if name.endswith(("gamma", "detail_gain")):
            weight.fill_(share)
    return network


def variant(folder, name, scale=2, **changes):
    """Loaded from a file, as users do."""
    torch.manual_seed(0)
    config = VariantConfig.of(name, scale, **{"attention": "window", **changes})
    network = awake(ParagonVariant(config))
    path = folder / f"{name}.safetensors"
    save_file(network.state_dict(), path, lowtide_files.metadata_for(network.config))
    return lowtide.load(path)


def tier(folder, name, scale=2, share=0.5, **changes):
    torch.manual_seed(0)
    network = awake(ParagonTier(replace(TierConfig.of(name, scale), **changes)), share)
    torch.save(network.state_dict(), folder / f"{name}.pth")
    return lowtide.load(folder / f"{name}.pth")


def checks(model, path, sizes=SIZES, **options):
    network = write_onnx(model, path, **options)
    run = OnnxRunner(path)
    return [compare_fp32(run, model, network, size) for size in sizes]


def assert_same(model, path, **options):
    found = checks(model, path, **options)
    assert max(check.difference for check in found) < 1e-5
    for check in found:
        with torch.inference_mode():
            made = model.module(random_image(model, (check.height, check.width)))
        assert check.passed
        # Of noise, pixels overshoot.
        assert check.bound == LARGEST_DIFFERENCE * max(1.0, made.abs().max().item())


@pytest.mark.parametrize("name", ["lowtide-x2", "lowtide-x4"])
def test_bundled_models(name, tmp_path):
    assert_same(lowtide.load(name), tmp_path / "model.onnx")


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "scale", "changes"),
    [
        ("nano", 1, {"attention": "none"}),
        ("nano", 2, {"attention": "none"}),
        ("tiny", 3, {"attention": "none"}),
        ("nano", 3, {"attention": "window", "window": 16}),
    ],
    ids=str,
)
def test_variants(name, scale, changes, tmp_path):
    assert_same(variant(tmp_path, name, scale, **changes), tmp_path / "model.onnx")


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["realtime", "stream", "pro"])
def test_tiers(name, tmp_path):
    assert_same(tier(tmp_path, name, **SMALL), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("form", ["halo", "blended"])
@pytest.mark.parametrize("name", ["nano", "tiny"])
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_windows_of_every_kind(name, scale, form, opset, tmp_path):
    model = variant(tmp_path, name, scale, attention="window", form=form)
    assert_same(model, tmp_path / "model.onnx", opset=opset)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["realtime", "stream", "photo", "pro"])
def test_whole_tiers(name, tmp_path):
    # Of 36 blocks with larger shares results are in the hundreds, and so is their rounding.
    assert_same(tier(tmp_path, name, 3, share=0.1), tmp_path / "model.onnx", opset=20)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("esrgan", "swinir")]


# PyTorch 2.11's exporter gives one of SPAN's constants two names, which ends in an error.
SPAN = pytest.param(
    "span", marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="fails in PyTorch 2.11")
)


@pytest.mark.parametrize("kind", ["compact", SPAN, "dncnn", *SLOW])
def test_models_of_other_projects(kind, network, write, tmp_path):
    model = lowtide.load(write(network(kind), "model.pth"))
    sizes = checked_sizes(model.descriptor.size)
    assert all(check.passed for check in checks(model, tmp_path / "model.onnx", sizes))


def test_attention_is_one_operator_from_opset_23_on(tmp_path):
    model = tier(tmp_path, "photo", **{**SMALL, "blocks": 1})
    for opset, fused in ((23, True), (20, False)):
        path = tmp_path / f"{opset}.onnx"
        write_onnx(model, path, opset=opset)
        graph = onnx.load(path)
        assert [one.version for one in graph.opset_import if not one.domain] == [opset]
        assert ("Attention" in {node.op_type for node in graph.graph.node}) == fused


@pytest.mark.slow
def test_size_dependent_results_are_exported_once_for_all_blocks(tmp_path, monkeypatch):
    # Else what is there twice would be dropped, late and after minutes.
    monkeypatch.setattr(onnx_graph, "simplify", lambda graph: None)
    made = []
    for blocks in (1, 3):
        write_onnx(variant(tmp_path, "nano", **SMALL | {"blocks": blocks}), tmp_path / "m.onnx")
        kinds = Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)
        made.append((kinds["Range"], kinds["Conv"]))
    assert made[0][0] == made[1][0] > 0
    assert made[0][1] < made[1][1]


def test_nothing_is_there_twice_or_for_nothing(tmp_path):
    write_onnx(variant(tmp_path, "nano", **SMALL), tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    read = {name for node in graph.node for name in node.input} | {one.name for one in graph.output}
    assert all(read.intersection(node.output) for node in graph.node)
    assert read.issuperset(one.name for one in graph.initializer)
    given = [(node.op_type, *node.input, *map(str, node.attribute)) for node in graph.node]
    assert len(given) == len(set(given))
    stored = {one.name for one in graph.initializer}
    assert not [node for node in graph.node if node.op_type == "Constant"]
    assert not [node for node in graph.node if node.input and stored.issuperset(node.input)]


@pytest.mark.slow
def test_nothing_of_the_machine_is_in_the_file(tmp_path):
    path = tmp_path / "m.onnx"
    write_onnx(variant(tmp_path, "nano", **SMALL), path)
    assert str(Path(lowtide.__file__).parent).encode() not in path.read_bytes()


@pytest.mark.slow
def test_half_precision_is_as_near_to_fp32_as_pytorch_is(tmp_path):
    model = variant(tmp_path, "tiny", 2, attention="window", window=16)
    path = tmp_path / "model.onnx"
    for check in checks(model, path, precision="fp16"):
        assert check.passed
        assert check.pytorch_difference is not None
        assert check.psnr_db is not None
        assert check.bound == max(LARGEST_DIFFERENCE, 2 * check.pytorch_difference)
        assert 50 < check.psnr_db < 130  # neither wrong nor fp32
    graph = onnx.load(path).graph
    (image,), (result,) = graph.input, graph.output
    fp32 = onnx.TensorProto.FLOAT
    assert (image.type.tensor_type.elem_type, result.type.tensor_type.elem_type) == (fp32, fp32)
    weights = {one.data_type for one in graph.initializer if len(one.dims) == 4}
    assert weights == {onnx.TensorProto.FLOAT16}
    # The model itself stays as it was.
    assert model.dtype == torch.float32


def test_the_runtime_has_no_convolution_in_bf16(tmp_path):
    write_onnx(lowtide.load("lowtide-x2"), tmp_path / "model.onnx", precision="bf16")
    with pytest.raises(CannotRunError, match=r"^Could not find an implementation for Conv"):
        OnnxRunner(tmp_path / "model.onnx")


def test_height_and_width_are_free_and_nothing_else(tmp_path):
    write_onnx(lowtide.load("lowtide-x2"), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    sides = [one.dim_value for one in graph.input[0].type.tensor_type.shape.dim]
    assert (graph.input[0].name, graph.output[0].name) == ("image", "result")
    assert sides == [1, 3, 0, 0]


@pytest.mark.parametrize("checked", [True, False])
def test_a_file_says_what_it_is(checked, tmp_path):
    model, path = lowtide.load("lowtide-x2"), tmp_path / "model.onnx"
    write_onnx(model, path)
    write_metadata(path, model, precision="fp32", checked=checked)
    found = {one.key: one.value for one in onnx.load(path).metadata_props}
    assert found == {
        "lowtide.architecture": "ParagonConv",
        "lowtide.scale": "2",
        "lowtide.license": "MIT",
        "lowtide.sha256": model.descriptor.sha256,
        "lowtide.precision": "fp32",
        "lowtide.size": '{"minimum": 0, "multiple_of": 1, "square": false}',
        "lowtide.checked": "yes" if checked else "no",
    }


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        (SizeRule(), ((33, 50), (19, 61), (64, 80), (129, 131))),
        (SizeRule(16, 8), ((40, 56), (24, 64), (64, 80), (136, 136))),
        (SizeRule(square=True), ((50, 50), (61, 61), (80, 80), (131, 131))),
        (SizeRule(64), ((64, 80), (129, 131))),
    ],
)
def test_sizes_follow_the_rule_and_are_not_the_exported_one(rule, sizes):
    assert checked_sizes(rule) == sizes


def test_nan_fails_the_check():
    assert not SizeCheck(1, 1, float("nan"), 1.0).passed


def test_a_model_that_overflows_in_fp16_allows_its_file_nothing(tmp_path):
    facts = lowtide.load("lowtide-x2").descriptor
    network = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False))
    nn.init.constant_(network[0].weight, 6e4)
    nn.init.constant_(network[1].weight, 1e-6)
    found = checks(Model(network, facts), tmp_path / "model.onnx", SIZES[:1], precision="fp16")
    assert [(check.bound, check.passed) for check in found] == [(LARGEST_DIFFERENCE, False)]


def test_two_functions_in_one_are_refused(tmp_path):
    """The graph of one stage would be used for all sizes, without a word."""
    model = variant(tmp_path, "tiny", attention="hierarchical")
    with pytest.raises(ModelError, match="HierarchicalAttention is another function above 16,384"):
        write_onnx(model, tmp_path / "model.onnx")


class Bessel(nn.Conv2d):
    def forward(self, input):
        return torch.special.bessel_j0(super().forward(input))


class Undecided(nn.Conv2d):
    def forward(self, input):
        return super().forward(input) if input.mean() > 0.3 else input


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Bessel, r"ONNX has no operator for prims\.bessel_j0$"), (Undecided, "guard")],
)
def test_operators_missing_in_onnx_are_named_in_one_line(kind, words, tmp_path):
    facts = replace(lowtide.load("lowtide-x2").descriptor, name="mine", architecture="Own")
    with pytest.raises(ModelError, match=words) as caught:
        write_onnx(Model(kind(3, 3, 1), facts), tmp_path / "model.onnx")
    assert caught.value.message.startswith("mine (Own) cannot be exported: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opset": 19}, "opset 19 is not one of 20, 23"),
        ({"precision": "int8"}, "fp16, bf16"),
        ({"precision": "bf16", "opset": 20}, "opset 20 has no convolution in bf16"),
    ],
)
def test_options_that_make_no_sense(options, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        write_onnx(lowtide.load("lowtide-x2"), tmp_path / "model.onnx", **options)


def test_a_precision_that_the_model_does_not_have(tmp_path):
    model = lowtide.load("lowtide-x2")
    model.descriptor = replace(model.descriptor, supports_half=False)
    with pytest.raises(UsageError, match="does not support fp16; it supports float64, float32"):
        write_onnx(model, tmp_path / "model.onnx", precision="fp16")
