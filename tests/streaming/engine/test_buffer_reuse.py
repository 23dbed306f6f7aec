"""Results that are put into the memory of what they are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.engine.band_schedule import schedule_bands
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity, program_of
from support.stream_models import Between


def overwritten(program, bands=3):
    """By operator what it is put over, in the first band of a sweep without cuts."""
    (part,) = cut_segments(program)
    band = next(schedule_bands(program, part, bands))
    nodes = program.graph.nodes
    return {op_name(nodes[index].target): nodes[one].name for index, one in band.in_place.items()}


def chain(x):
    return F.silu(F.gelu(x) * 0.5) + 1.0


def test_a_chain_of_pointwise_operators_stays_in_one_place():
    module, image = Between(chain), torch.rand(1, 3, 33, 21, dtype=torch.float64)
    program = program_of(module, image)
    assert overwritten(program) == {"gelu": "conv2d", "mul": "gelu", "silu": "mul", "add": "silu"}
    storages = set()
    for index, step in program.steps.items():
        if op_name(program.graph.nodes[index].target) in ("gelu", "mul", "silu", "add"):
            (one,) = step.inputs
            given = torch.rand(1, 8, 5, 21, dtype=torch.float64)
            made = step.in_place_runs[one]((0, 5), [given], [])
            storages.add(made.data_ptr() == given.data_ptr())
            # A part of something larger is left alone.
            wide = torch.rand(1, 8, 9, 21, dtype=torch.float64)
            before = wide.clone()
            step.in_place_runs[one]((0, 5), [wide.narrow(2, 0, 5)], [])
            assert torch.equal(wide, before)
    assert storages == {True}
    check_parity(module, image)


def read_after(x):
    return x.relu() + x * 2


def view_read_after(x):
    flat = x.flatten(2).relu().unflatten(2, x.shape[2:])
    return flat + x


def part_read_after(x):
    return F.pad(x[:, :, 2:].neg(), (0, 0, 2, 0)) + F.pad(x[:, :, :-2].exp(), (0, 0, 0, 2)) + x


def given_back_read_after(x):
    same = F.dropout(x, 0.5, False).to(x.dtype).contiguous()
    return same.neg() + x


def both_of_one(x):
    return x * x.flatten(2).unflatten(2, x.shape[2:]) + x


def both_of_one_turned(x):
    return x * x.transpose(1, 3)


def held_for_the_next_band(x):
    # The second needs more rows ahead, the first more of those that were there before.
    return F.avg_pool2d(x, 5, 1, 2) + F.avg_pool2d(x.relu(), 9, 1, 4)


def spread_out(x):
    one = x.mean(1, keepdim=True)
    return one.expand(1, 8, *x.shape[2:]).neg() + one


def scaled_second(x):
    return torch.add(x.mean(1, keepdim=True), x.relu(), alpha=2.0)


def of_another_order(x):
    return x + (x.permute(0, 2, 3, 1) @ torch.eye(8, dtype=x.dtype)).permute(0, 3, 1, 2)


def rounded(x):
    return (x.float() * 2).double() + x


@pytest.mark.parametrize(
    "function",
    [
        read_after,
        view_read_after,
        part_read_after,
        given_back_read_after,
        both_of_one,
        both_of_one_turned,
        held_for_the_next_band,
        spread_out,
        scaled_second,
        of_another_order,
        rounded,
    ],
)
def test_rows_that_are_read_later_are_not_overwritten(function):
    image = torch.rand(1, 3, 29, 8, dtype=torch.float64)
    check_parity(Between(function), image, share=1e-11 if function is not rounded else 1e-6)


def test_neither_the_image_nor_weights_nor_pages_are_overwritten():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.rand(3, 1, 1, dtype=torch.float64))
            self.inside = nn.Conv2d(3, 3, 3, padding=1).double()

        def forward(self, image):
            kept = self.inside(self.scale.exp() * image.neg())
            # The mean ends a sweep; the next one reads what was kept.
            return kept - kept.relu().mean((2, 3), keepdim=True) + image

    module, image = Bare(), torch.rand(1, 3, 24, 10, dtype=torch.float64)
    weights = module.scale.detach().clone()
    check_parity(module, image)
    assert torch.equal(module.scale, weights)
