"""Networks compiled or captured for one shape; PyTorch's CUDA graphs are stood in for on a CPU."""

import functools

import pytest
import torch
import torch._inductor.config
from torch import nn

from lowtide import ModelError, UsageError
from lowtide.streaming.planner.tile_variants import with_compile, with_cuda_graph
from lowtide.streaming.specialize import require_cuda_graphs, specialize_network
from support.cuda_graphs import graphs_on_the_cpu
from support.processor import needs_the_compiler
from support.toy_models import conv_net, make_plan, network, pictures

picture = pictures()
SHAPE = (2, 3, 24, 20)


@pytest.fixture
def plan():
    return make_plan(picture(120, 160, 3, "uint8"), 4, tile=64)


@pytest.mark.parametrize(
    "as_graph",
    [pytest.param(False, id="compiled", marks=needs_the_compiler), pytest.param(True, id="graph")],
)
def test_the_same_values_by_one_shape_only(as_graph, monkeypatch):
    graphs = graphs_on_the_cpu(monkeypatch)
    plain = network(conv_net())
    fast = specialize_network(plain, SHAPE, as_graph=as_graph)
    assert (fast.scale, fast.device) == (plain.scale, plain.device)
    replays = graphs.replayed
    with torch.inference_mode():
        for shape in (SHAPE, (1, 3, 24, 20), (2, 3, 8, 9)):
            images = torch.rand(shape)
            assert (fast.forward(images) - plain.forward(images)).abs().max() < 1e-5
    assert (graphs.captured, graphs.replayed - replays) == ((1, 1) if as_graph else (0, 0))


class Unlike(nn.Module):
    """Gives something else where it is compiled."""

    def forward(self, x):
        return x + torch.compiler.is_compiling()


@needs_the_compiler
def test_a_compiled_network_that_differs_or_fails_is_refused():
    with pytest.raises(ModelError, match="compiling changes the result by"):
        specialize_network(network(Unlike(), scale=1), (1, 3, 8, 8), as_graph=False)
    lacking = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(lacking),
        pytest.raises(ModelError, match="compiling fails for this network") as caught,
    ):
        specialize_network(network(conv_net()), (1, 3, 16, 16), as_graph=False)
    assert caught.value.hint == "--compile off"


def test_a_folder_of_many_sizes_is_compiled_for_each(monkeypatch):
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    # Dynamo's part alone: a C++ compiler would take seconds for each.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    net = network(conv_net())
    for side in range(16, 28):  # PyTorch's own limit is 8
        specialize_network(net, (1, 3, side, side), as_graph=False)
    assert len(made) == 12


def test_results_and_images_of_a_graph_have_memory_of_their_own(monkeypatch):
    graphs_on_the_cpu(monkeypatch)
    fast = specialize_network(network(conv_net()), SHAPE, as_graph=True)
    with torch.inference_mode():
        images = torch.rand(SHAPE)
        first = fast.forward(images)
        kept = first.clone()
        fast.forward(torch.rand(SHAPE))
        assert torch.equal(first, kept)
        images.zero_()
        assert not torch.equal(fast.forward(images), kept)


def test_channels_that_lie_last_do_so_in_the_graph(monkeypatch):
    graphs_on_the_cpu(monkeypatch)
    seen = []
    net = network(conv_net(), channels_last=True)
    net.forward.register_forward_pre_hook(lambda _, given: seen.append(given[0].stride()))
    specialize_network(net, SHAPE, as_graph=True)
    assert len(set(seen)) == 1
    assert seen[0] == torch.empty(SHAPE).contiguous(memory_format=torch.channels_last).stride()


class AsksTheHost(nn.Module):
    """As a GPU refuses during capture."""

    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:  # the first is what the graph is compared with
            raise self.error
        return x


def test_a_graph_that_differs_or_fails_is_refused(monkeypatch):
    graphs_on_the_cpu(monkeypatch)
    refused = RuntimeError("operation not permitted when stream is capturing\nmore")
    failure = r"capturing a CUDA graph fails for this network: RuntimeError.*capturing$"
    with pytest.raises(ModelError, match=failure) as caught:
        specialize_network(network(AsksTheHost(refused), scale=1), SHAPE, as_graph=True)
    assert "--cuda-graphs" in caught.value.hint
    lack = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        specialize_network(network(AsksTheHost(lack), scale=1), SHAPE, as_graph=True)
    # It gives what it was captured with, whatever it is asked.
    monkeypatch.setattr(
        torch.cuda, "make_graphed_callables", lambda run, given: lambda _: run(*given)
    )
    with pytest.raises(ModelError, match="capturing a CUDA graph changes the result by"):
        specialize_network(network(conv_net()), SHAPE, as_graph=True)


def test_the_cpu_has_no_graphs():
    with pytest.raises(UsageError, match="cpu has no CUDA graphs"):
        require_cuda_graphs("cpu")


def test_a_compiled_plan_waits_and_counts_the_compiler(plan):
    one, many = with_compile(plan, 1), with_compile(plan, 40)
    assert one.seconds - plan.seconds == pytest.approx(40 * (many.seconds - plan.seconds))
    assert one.seconds > plan.seconds
    assert one.predicted_bytes == plan.predicted_bytes + (150 << 20)
    assert one.upper_bytes == plan.upper_bytes + (225 << 20)
    assert one.ledger[-1].origin == "prior"
    assert "compiled" in one.title


def test_a_captured_plan_counts_the_graph_and_its_making(plan):
    one, many = with_cuda_graph(plan, 1), with_cuda_graph(plan, 40)
    # What the allocator keeps for it is in the graph's pool as well.
    held = "live activations and workspace", "allocator"
    graph = sum(row.value for row in plan.ledger if row.name in held)
    assert one.predicted_bytes == plan.predicted_bytes + graph
    assert one.upper_bytes > plan.upper_bytes + graph
    # Six runs of a tile are waited for, once for all images.
    a_tile = plan.seconds * plan.strategy.batch / plan.strategy.tiles
    assert one.seconds == pytest.approx(plan.seconds + 6 * a_tile)
    assert many.seconds == pytest.approx(plan.seconds + 6 * a_tile / 40)
    assert "as a CUDA graph" in one.title
