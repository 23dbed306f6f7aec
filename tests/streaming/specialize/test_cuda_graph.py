"""Networks as CUDA graphs: all but the calls to a GPU."""

import pytest
import torch
from torch import nn

from lowtide.core.errors import ModelError, UsageError
from lowtide.streaming.planner.tile_variants import with_cuda_graph
from lowtide.streaming.specialize.cuda_graph import cuda_graph_for
from lowtide.streaming.specialize.shape_specialized import ShapeSpecialized
from support.toy_models import conv_net, make_plan, network, pictures

picture = pictures()
SHAPE = (2, 3, 24, 20)


def again(run):
    """A recorder for the CPU: what is recorded is run again, into the same memory."""
    made = run()
    return made, lambda: made.copy_(run())


def frozen(run):
    """One that forgets to compute."""
    return torch.zeros_like(run()), lambda: None


def test_the_same_values_by_one_shape_only():
    plain = network(conv_net())
    fast, facts = cuda_graph_for(plain, SHAPE, again)
    assert facts.ratio > 0
    assert isinstance(fast.forward, ShapeSpecialized)
    assert (fast.scale, fast.device) == (plain.scale, plain.device)
    with torch.inference_mode():
        for shape in (SHAPE, (1, 3, 24, 20), (2, 3, 8, 9)):
            images = torch.rand(shape)
            assert torch.equal(fast.forward(images), plain.forward(images))
    assert len(list(fast.forward.parameters())) == len(list(plain.forward.parameters()))


def test_results_and_images_have_memory_of_their_own():
    fast, _ = cuda_graph_for(network(conv_net()), SHAPE, again)
    with torch.inference_mode():
        images = torch.rand(SHAPE)
        first = fast.forward(images)
        kept = first.clone()
        fast.forward(torch.rand(SHAPE))
        assert torch.equal(first, kept)
        images.zero_()
        assert not torch.equal(fast.forward(images), kept)


def test_channels_that_lie_last_do_so_in_the_recording():
    seen = []
    net = network(conv_net(), channels_last=True)
    net.forward.register_forward_pre_hook(lambda _, given: seen.append(given[0].stride()))
    cuda_graph_for(net, SHAPE, again)
    assert len(set(seen)) == 1
    assert seen[0] == torch.empty(SHAPE).contiguous(memory_format=torch.channels_last).stride()


class AsksTheHost(nn.Module):
    """As a GPU refuses during capture."""

    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:  # the first is what the recording is compared with
            raise self.error
        return x


def test_a_recording_that_differs_or_fails_is_refused():
    with pytest.raises(ModelError, match="captured network differs by"):
        cuda_graph_for(network(conv_net()), SHAPE, frozen)
    refused = RuntimeError("operation not permitted when stream is capturing\nmore")
    with pytest.raises(ModelError, match=r"cannot be captured.*capturing$") as caught:
        cuda_graph_for(network(AsksTheHost(refused), scale=1), SHAPE, again)
    assert "--cuda-graphs" in caught.value.hint
    lack = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        cuda_graph_for(network(AsksTheHost(lack), scale=1), SHAPE, again)


def test_the_cpu_has_no_graphs():
    with pytest.raises(UsageError, match="cpu has no CUDA graphs"):
        cuda_graph_for(network(conv_net()), SHAPE)


def test_a_recorded_plan_counts_the_graph_and_its_making():
    plan = make_plan(picture(120, 160, 3, "uint8"), 4, tile=64)
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
