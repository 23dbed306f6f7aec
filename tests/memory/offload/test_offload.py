"""Streamed weights: the same bytes come out, and each block is there when it is needed."""

import pytest
import torch

from lowtide.core.errors import BudgetError
from lowtide.memory.offload.block_hooks import BlockHooks
from lowtide.memory.offload.buffers import BufferLayout, HostLoader, HostWeightSource
from lowtide.memory.offload.offload_plan import plan_offload
from lowtide.memory.offload.stream import stream_weights
from lowtide.memory.offload.weight_blocks import find_blocks, tensor_slots
from lowtide.memory.pinned import PinnedMemory
from support.offloaded_models import (
    ZOO,
    Again,
    Chosen,
    Mixed,
    Recurrent,
    Stack,
    build,
    inputs,
    state_of,
)
from support.offloaded_weights import plan_all, run, same


@pytest.mark.grid(5)
@pytest.mark.parametrize("split_layers", [False, True], ids=["layers", "modules"])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("kind", ZOO)
def test_the_same_bytes_and_the_model_back(kind, in_flight, split_layers, tmp_path):
    model, expected = build(kind), run(build(kind))
    before, tensors = state_of(model), [*model.parameters(), *model.buffers()]
    strides = [tensor.stride() for tensor in tensors]
    plan = plan_all(model, in_flight=in_flight, split_layers=split_layers)
    with stream_weights(model, plan, scratch_dir=tmp_path) as stream:
        results = [run(model) for _ in range(3)]
        assert stream.loads >= len(plan.streamed)
    assert all(same(result, expected) for result in results)
    assert state_of(model) == before
    assert all(
        a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert [tensor.stride() for tensor in tensors] == strides
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not [*tmp_path.iterdir()]
    assert same(run(model), expected)


@pytest.mark.parametrize("kind", ZOO)
def test_any_budget_gives_the_same_bytes(kind):
    model, expected = build(kind), run(build(kind))
    total = sum(block.nbytes for block in find_blocks(model))
    with pytest.raises(BudgetError) as caught:
        plan_offload(model, 1)
    smallest = caught.value.smallest
    assert smallest is not None
    for share in (0, 0.2, 0.5, 0.9):
        plan = plan_offload(model, int(smallest + share * (total - smallest)))
        with stream_weights(model, plan):
            assert same(run(model, 2), expected)


def test_recurrent_layers_let_the_buffers_go():
    """They keep lists of their weights, which have to follow."""
    model = build(Recurrent)
    with stream_weights(model, plan_all(model)):
        run(model)
    for layer in model.layers:
        kept = [getattr(layer, name) for name in layer._flat_weights_names]
        assert all(a is b for a, b in zip(layer._flat_weights, kept, strict=True))


def test_recurrent_layers_keep_their_weights_in_the_buffers(monkeypatch):
    """On CUDA they would move them into memory of their own when they find others in place."""

    def flatten(layer):
        with torch.no_grad():
            for weight in layer._flat_weights:
                weight.set_(weight.clone())

    model, expected = build(Recurrent), run(build(Recurrent))
    monkeypatch.setattr(torch.nn.RNNBase, "flatten_parameters", flatten)
    with stream_weights(model, plan_all(model)):
        assert same(run(model, 3), expected)
    assert not any("flatten_parameters" in vars(layer) for layer in model.layers)
    assert same(run(model), expected)


def test_a_plan_that_streams_nothing_changes_nothing():
    model = build(Stack)
    with stream_weights(model, plan_offload(model, 1 << 30)) as stream:
        assert same(run(model), run(build(Stack)))
    assert stream.loads == 0


def test_gradients_work_again_afterwards():
    model = build(Stack)
    with torch.inference_mode(), stream_weights(model, plan_all(model)):
        run(model)
    model(inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class WatchedLane(HostLoader):
    """Notes what a lane of a device relies on: who may touch a slot, and when."""

    def __init__(self):
        self.loaded, self.used = set(), set()

    def load(self, slot, layout, source):
        assert slot not in self.used
        self.loaded.discard(slot)
        super().load(slot, layout, source)
        self.loaded.add(slot)

    def wait_for_copy(self, slot):
        assert slot in self.loaded
        self.used.add(slot)

    def mark_used(self, slot):
        assert slot in self.used
        self.used.discard(slot)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("kind", [Stack, Again, Mixed])
def test_blocks_in_host_memory_and_copies_of_a_transfer(kind, in_flight):
    """What CUDA streams from, and what its events stand for, on the CPU."""
    model, expected, lane = build(kind), run(build(kind)), WatchedLane()
    turns = turns_by(lane, model, in_flight)
    assert same(run(model, 3), expected)
    turns.close()
    assert not lane.used
    assert same(run(model), expected)


def turns_by(lane, model, in_flight):
    """Blocks of ``model`` that come from host memory by ``lane``, begun."""
    found = {place.name: place for place in tensor_slots(model)}
    layouts = [
        BufferLayout(block, [found[name] for name in block.tensors])
        for block in plan_all(model).streamed
    ]
    source = HostWeightSource(PinnedMemory())
    for layout in layouts:
        source.add(
            layout,
            lambda memory, layout=layout: [
                view.copy_(place.tensor.detach())
                for place, view in zip(layout.places, layout.views(memory), strict=True)
            ],
        )
    turns = BlockHooks(model, layouts, source, lane, in_flight)
    turns.open()
    return turns


class HastyLane(HostLoader):
    """Overwrites a slot as soon as it may, which on CUDA the next block's copy does."""

    def mark_used(self, slot):
        slot.buffer.data.fill_(255)  # by another name: only the block's own changes are counted


def test_weights_returned_by_a_block_are_copied_before_its_slot_is_reused():
    model, expected = build(Mixed), run(build(Mixed))
    turns = turns_by(HastyLane(), model, 2)
    assert same(run(model), expected)
    turns.close()


@pytest.mark.parametrize("kind", [Stack, Again])
def test_nothing_is_waited_for_once_the_order_is_known(kind):
    model = build(kind)
    with stream_weights(model, plan_all(model)) as stream:
        run(model, 2)
        misses, loads = stream.misses, stream.loads
        run(model, 3)
        assert stream.misses == misses
        assert stream.loads > loads


def test_one_slot_loads_when_needed():
    model = build(Stack)
    plan = plan_all(model, in_flight=1)
    with stream_weights(model, plan) as stream:
        run(model, 2)
    assert stream.misses == stream.loads == 2 * len(plan.streamed)
    assert stream.loaded_bytes == 2 * plan.streamed_bytes


def test_blocks_may_be_left_out_repeated_and_reordered(layers):
    model, stream = layers
    orders = [(0, 1, 2), (7, 6, 5, 4), (3, 3, 3), (1, 5, 1, 5, 0), (), (0, 1, 2, 3, 4, 5, 6, 7)]
    for order in orders * 2:
        model.chosen = order
        resident = build(Chosen)
        resident.chosen = order
        assert same(run(model), run(resident))
    assert stream.loads > 0


def test_a_block_called_again_is_not_loaded_again(layers):
    model, stream = layers
    model.chosen = (4,) * 10
    run(model)
    before = stream.loads
    model.chosen = (4,) * 20
    run(model)
    assert stream.loads - before <= 4
