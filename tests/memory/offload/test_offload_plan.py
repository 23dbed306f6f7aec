"""Splitting a model into blocks, and choosing which of them stay."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lowtide.core.errors import BudgetError, UsageError
from lowtide.memory.offload.offload_plan import OffloadPlan, plan_offload
from lowtide.memory.offload.weight_blocks import find_blocks
from support.offloaded_models import ZOO, Attention, Mixed, Parts, Stack, Tied, build

SPLITS = [
    dict(),
    dict(largest_bytes=0),
    dict(largest_bytes=0, split_layers=True),
    dict(largest_bytes=1 << 40),
]


def smallest_of(model, **options):
    with pytest.raises(BudgetError) as caught:
        plan_offload(model, 1, **options)
    assert caught.value.smallest is not None
    return caught.value.smallest


@pytest.mark.grid(5)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", ZOO)
def test_blocks_are_a_partition(kind, split):
    model = build(kind)
    blocks = find_blocks(model, **split)
    names = [name for block in blocks for name in block.tensors]
    known = dict((*model.named_parameters(), *model.named_buffers()))
    assert sorted(names) == sorted(known)
    assert len({block.name for block in blocks}) == len(blocks)
    for block in blocks:
        nbytes = sum(known[name].nbytes for name in block.tensors)
        assert nbytes <= block.nbytes < nbytes + 512 * (len(block.tensors) + 1)


def test_layers_of_a_list_are_blocks_and_small_ones_share_one():
    blocks = find_blocks(build(Stack))
    assert [block.name for block in blocks] == [
        "place",
        "enter … leave",
        *(f"layers.{index}" for index in range(8)),
    ]
    assert [block.modules for block in blocks[:2]] == [(), ("enter", "leave")]
    chain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(256)))
    assert 32 <= len(find_blocks(chain)) <= 64


def test_layers_are_split_only_on_request():
    model = build(Stack)
    whole = find_blocks(model, largest_bytes=0)
    assert "layers.0" in {block.name for block in whole}
    split = {block.name for block in find_blocks(model, largest_bytes=0, split_layers=True)}
    assert {"layers.0.norm", "layers.0.up", "layers.0.down"} <= split


def test_modules_that_read_their_submodules_weights_are_not_split():
    blocks = find_blocks(build(Attention), largest_bytes=0, split_layers=True)
    names = {block.name for block in blocks}
    assert names == {"alone", *(f"encoder.layers.{index}" for index in range(6))}
    names = {b.name for b in find_blocks(build(Mixed), largest_bytes=0, split_layers=True)}
    assert {"normed.0", "low.3", "tables.5"} <= names


def test_weights_that_cannot_be_streamed_have_no_modules():
    held = {
        name for block in find_blocks(build(Tied)) if not block.modules for name in block.tensors
    }
    assert held == {"first.weight", "twice.0.weight", "twice.0.bias"}
    held = {block.name for block in find_blocks(build(Mixed)) if not block.modules}
    assert held == {"loose.0", "loose.1"}


def test_other_tensors_than_plain_ones_stay():
    class Own(torch.Tensor):
        pass

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    model[3].weight = nn.Parameter(torch.randn(8, 8).as_subclass(Own))
    model[4].register_buffer("wide", torch.randn(1, 8).expand(8, 8))
    held = {block.name for block in find_blocks(model) if not block.modules}
    assert held == {"3.weight", "4.wide"}


def test_names_can_be_kept_resident():
    model = build(Stack)
    blocks = find_blocks(model, resident=["layers.3", "leave.bias"])
    held = {block.name for block in blocks if not block.modules}
    assert held == {
        "place",
        "leave.bias",
        *(
            f"layers.3.{part}"
            for part in (
                "norm.weight",
                "norm.bias",
                "up.weight",
                "up.bias",
                "down.weight",
                "down.bias",
            )
        ),
    }
    plan = plan_offload(model, smallest_of(model, resident=["layers.3"]), resident=["layers.3"])
    assert not [b for b in plan.streamed if any(n.startswith("layers.3.") for n in b.tensors)]
    with pytest.raises(UsageError, match=r"layers\.33"):
        plan_offload(model, 1 << 20, resident=["layers.33"])


@pytest.mark.grid(4)
@pytest.mark.parametrize("activations", [0, 3000])
@pytest.mark.parametrize("kind", ZOO)
def test_every_budget_is_kept_down_to_the_smallest(kind, activations):
    model = build(kind)
    options = dict(activation_bytes=activations)
    smallest = smallest_of(model, **options)
    with pytest.raises(BudgetError) as caught:
        plan_offload(model, smallest - 1, **options)
    assert caught.value.smallest == smallest
    total = sum(block.nbytes for block in find_blocks(model)) + activations
    assert smallest < total
    for budget in range(smallest, total, max(1, (total - smallest) // 12)):
        plan = plan_offload(model, budget, **options)
        assert plan.peak_bytes <= budget
        assert plan.streamed
        assert plan.peak_bytes == (
            plan.resident_bytes + plan.in_flight * plan.largest_streamed_bytes + activations
        )


def test_a_model_that_fits_is_left_alone():
    model = build(Stack)
    plan = plan_offload(model, 1 << 30)
    assert plan.streamed == ()
    assert plan.buffer_bytes == 0


def test_more_budget_means_more_residents_and_one_block_ahead():
    model = build(Stack)
    layer = find_blocks(model)[-1].nbytes
    loaded = [plan_offload(model, count * layer).streamed_bytes for count in range(3, 9)]
    assert loaded == sorted(loaded, reverse=True)
    assert loaded[-1] < loaded[0]
    assert plan_offload(model, 4 * layer).in_flight == 2
    assert plan_offload(model, smallest_of(model)).in_flight == 1


def test_residents_lie_between_what_streams():
    model = build(Stack)
    layer = find_blocks(model)[-1].nbytes
    plan = plan_offload(model, 6 * layer)
    streamed = [int(b.name.split(".")[1]) for b in plan.streamed if b.name.startswith("layers.")]
    assert len(streamed) in (4, 5)
    assert max(right - left for left, right in pairwise(streamed)) > 1


def test_whole_layers_are_preferred():
    model = build(Parts)
    layer = find_blocks(model)[-1].nbytes
    names = {block.name for block in plan_offload(model, 4 * layer).streamed}
    assert names <= {f"inner.{index}" for index in range(8)}
    names = {block.name for block in plan_offload(model, layer).streamed}
    assert names & {f"inner.{index}.up" for index in range(8)}


def test_the_error_says_what_is_needed():
    with pytest.raises(BudgetError, match="for activations") as caught:
        plan_offload(build(Stack), 1000, activation_bytes=1 << 20)
    assert caught.value.hint == "a budget of 2MiB"


def test_a_plan_needs_no_memory_and_is_json():
    with torch.device("meta"):
        model = Stack()
    plan = plan_offload(model, 60_000)
    assert plan == plan_offload(build(Stack), 60_000)
    assert OffloadPlan.model_validate_json(plan.model_dump_json()) == plan
