"""Networks compiled for one shape, and what plans make of that."""

import functools

import pytest
import torch
import torch._inductor.config
from torch import nn

from lowtide.core.errors import ModelError
from lowtide.streaming.planner.tile_variants import with_compile
from lowtide.streaming.specialize.shape_specialized import ShapeSpecialized, SpecializationGain
from lowtide.streaming.specialize.torch_compile import CompileCache, compile_for
from support.toy_models import conv_net, make_plan, network, pictures

picture = pictures()


@pytest.fixture
def plan():
    return make_plan(picture(120, 160, 3, "uint8"), 4, tile=64)


def test_the_same_values_by_one_shape_only():
    plain = network(conv_net())
    fast, facts = compile_for(plain, (1, 3, 24, 20))
    assert facts.ratio > 0
    assert facts.warmup_seconds > 0
    assert isinstance(fast.forward, ShapeSpecialized)
    assert (fast.scale, fast.device) == (plain.scale, plain.device)
    with torch.inference_mode():
        for shape in ((1, 3, 24, 20), (2, 3, 24, 20), (1, 3, 8, 9)):
            images = torch.rand(shape)
            assert (fast.forward(images) - plain.forward(images)).abs().max() < 1e-5
    assert len(list(fast.forward.parameters())) == len(list(plain.forward.parameters()))


class Unlike(nn.Module):
    """Gives something else where it is compiled."""

    def forward(self, x):
        return x + torch.compiler.is_compiling()


def test_a_compiled_network_that_differs_or_fails_is_refused():
    with pytest.raises(ModelError, match="differs by"):
        compile_for(network(Unlike(), scale=1), (1, 3, 8, 8))
    lacking = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(lacking),
        pytest.raises(ModelError, match="cannot compile") as caught,
    ):
        compile_for(network(conv_net()), (1, 3, 16, 16))
    assert caught.value.hint == "--compile off"


def test_gains_are_cached_by_model_and_precision():
    facts = SpecializationGain(ratio=0.7, warmup_seconds=21.0, host_bytes=300 << 20)
    CompileCache("cpu").put("a" * 64, "fp32", facts)
    assert CompileCache("cpu").get("a" * 64, "fp32") == facts
    assert CompileCache("cpu").get("a" * 64, "bf16") is None


def test_a_compiled_plan_waits_and_counts_the_compiler(plan):
    facts = SpecializationGain(ratio=0.5, warmup_seconds=20.0, host_bytes=200 << 20)
    one, many = with_compile(plan, facts, 1), with_compile(plan, facts, 40)
    assert one.seconds == pytest.approx(plan.seconds * 0.5 + 20)
    assert many.seconds == pytest.approx(plan.seconds * 0.5 + 0.5)
    assert one.predicted_bytes == plan.predicted_bytes + (200 << 20)
    assert one.upper_bytes == plan.upper_bytes + (300 << 20)
    assert "compiled" in one.title
    unknown = with_compile(plan, None, 1)
    assert unknown.ledger[-1].origin == "prior"
    assert unknown.seconds > plan.seconds


def test_a_folder_of_many_sizes_is_compiled_for_each(monkeypatch):
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    # Dynamo's part alone: a C++ compiler would take seconds for each.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    net = network(conv_net())
    for side in range(16, 28):  # PyTorch's own limit is 8
        compile_for(net, (1, 3, side, side))
    assert len(made) == 12
