"""Two linear layers with GELU between them, run as one operator."""

import pytest
import torch
from torch import nn

from lowtide.attention import linear_ops
from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity, program_of


class Mixer(nn.Module):
    """Convolutions, and between them layers over the channels of each pixel."""

    def __init__(self, between=40, *, bias=True, plus=True, kept=False, gelu=None, first=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 3, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.one, self.two = nn.Linear(12, between, bias=bias), nn.Linear(between, 12, bias=bias)
        self.gelu, self.plus, self.kept, self.put_first = gelu or nn.GELU(), plus, kept, first

    def forward(self, image):
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        between = self.one(self.norm(tokens))
        found = self.two(self.gelu(between))
        if self.plus:
            found = tokens + found if self.put_first else found + tokens
        if self.kept:
            found = found + between.mean(-1, keepdim=True)
        return self.last(found.transpose(1, 2).view(x.shape))


def names(program):
    return [
        op_name(program.graph.nodes[index].target)
        for index in program.steps
        if index < len(program.graph.nodes)
    ]


@pytest.mark.parametrize(
    ("size", "more"),
    [
        ((1, 1), {}),
        ((2, 7), {"between": 300}),
        ((13, 31), {}),
        ((13, 31), {"bias": False}),
        ((5, 3), {"plus": False}),
        ((5, 3), {"first": False}),
        ((13, 31), {"between": 7, "bias": False, "plus": False}),
    ],
    ids=str,
)
def test_it_gives_what_the_model_gives(monkeypatch, more, size):
    monkeypatch.setattr(linear_ops, "_MLP_BLOCK_TOKENS", 50)
    torch.manual_seed(1)
    image = torch.randn(1, 3, *size)
    module = Mixer(**more)
    assert "gelu" not in names(program_of(module, image))
    check_parity(module, image, share=3e-6)


@pytest.mark.parametrize(
    "more",
    [
        {"kept": True},
        {"gelu": nn.SiLU()},
        {"gelu": nn.GELU(approximate="tanh")},
    ],
    ids=str,
)
def test_others_stay_as_they_are(more):
    image = torch.randn(1, 3, 9, 8)
    module = Mixer(**more)
    assert names(program_of(module, image)).count("linear") == 2
    check_parity(module, image, share=3e-6)


def test_other_types_stay_as_they_are():
    image = torch.randn(1, 3, 9, 8, dtype=torch.float64)
    module = Mixer().double()
    assert "gelu" in names(program_of(module, image))
    check_parity(module, image)
