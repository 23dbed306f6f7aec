"""Overlapping windows that a model lays out as columns, cut out of the image."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity, program_of

SIDE = 4


class Overlapping(nn.Module):
    """Sums over larger windows around windows, weighted by place, as HAT lays them out."""

    def __init__(self, *, seen=6, last_view=True, kept=False, pad=None, dilation=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)
        self.seen, self.last_view, self.kept, self.dilation = seen, last_view, kept, dilation
        self.pad = (seen - SIDE) // 2 if pad is None else pad
        self.weight = nn.Parameter(torch.randn(seen * seen, SIDE * SIDE))

    def forward(self, image):
        x = self.first(image)
        height, width = x.shape[2:]
        columns = F.unfold(x, self.seen, self.dilation, self.pad, SIDE)
        count = columns.shape[2]
        split = columns.view(1, 2, 3, self.seen, self.seen, count)
        laid = split.permute(1, 0, 5, 3, 4, 2)
        if self.last_view:
            laid = laid.view(2, count, self.seen**2, 3).contiguous()
        else:
            laid = laid.contiguous().view(2, count, self.seen**2, 3)
        places = laid[0] * 2 - laid[1]
        if self.kept:
            places = places + columns[:, :1].reshape(count, 1, 1)
        found = places.transpose(1, 2) @ self.weight
        found = found.view(1, height // SIDE, width // SIDE, 3, SIDE, SIDE)
        image = found.permute(0, 3, 1, 4, 2, 5).reshape(1, 3, height, width)
        return self.last(image)


def names(program):
    return {
        op_name(program.graph.nodes[index].target)
        for index in program.steps
        if index < len(program.graph.nodes)
    }


@pytest.mark.parametrize(
    ("size", "more"),
    [
        ((8, 4), {}),
        ((20, 28), {}),
        ((12, 8), {"seen": 8}),
        ((8, 12), {"seen": 4}),
        ((20, 28), {"last_view": False}),
    ],
    ids=str,
)
def test_patches_are_those_of_the_image(more, size):
    torch.manual_seed(1)
    image = torch.randn(1, 3, *size, dtype=torch.float64)
    module = Overlapping(**more).double()
    assert "im2col" not in names(program_of(module, image))
    check_parity(module, image)


def test_columns_that_something_else_reads_stay():
    torch.manual_seed(1)
    image = torch.randn(1, 3, 12, 8, dtype=torch.float64)
    module = Overlapping(kept=True).double()
    assert "im2col" in names(program_of(module, image))
    check_parity(module, image)


def test_the_same_bits_as_of_columns():
    """Only copies are made."""
    torch.manual_seed(1)
    image = torch.randn(1, 3, 20, 28)
    module = Overlapping().eval()
    program = program_of(module, image)
    (cut,) = (
        step
        for index, step in program.steps.items()
        if index < len(program.graph.nodes)
        and op_name(program.graph.nodes[index].target) == "clone"
        and len(program.graph.nodes[index].meta.shape) == 4
    )
    x = module.first(image)
    columns = F.unfold(x, 6, 1, 1, SIDE).view(1, 2, 3, 6, 6, -1)
    expected = columns.permute(1, 0, 5, 3, 4, 2).reshape(2, -1, 36, 3)
    assert torch.equal(cut.run((0, cut.rows.size), [x], []), expected)
    first, last = 7, 21  # the second and third rows of windows
    (span,) = cut.input_spans((first, last))[0]
    found = cut.run((first, last), [x[:, :, slice(*span)]], [])
    assert torch.equal(found, expected[:, first:last])
