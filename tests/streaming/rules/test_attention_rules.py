"""Attention of bands of queries to the whole image."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity, program_of


class Attending(nn.Module):
    """Convolutions, and between them attention of each pixel to all, as in an autoencoder."""

    def __init__(self, heads=1, scale=None, value_dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.queries, self.keys = nn.Linear(16, 16), nn.Linear(16, 16)
        self.values, self.out = nn.Linear(16, value_dim), nn.Linear(value_dim, 16)
        self.heads, self.scale = heads, scale

    def forward(self, image):
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)
        query, key, value = (
            layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        found = self.out(found.transpose(1, 2).flatten(2)).transpose(1, 2)
        return self.last(x + found.view(x.shape))


def step_of(program):
    (found,) = [
        step
        for index, step in program.steps.items()
        if index < len(program.graph.nodes)
        and op_name(program.graph.nodes[index].target) == "scaled_dot_product_attention"
    ]
    return found


@pytest.mark.parametrize("size", [(24, 23), (31, 29)], ids=str)
@pytest.mark.parametrize("more", [{}, {"heads": 4}, {"scale": 0.7}], ids=str)
def test_bands_of_queries_give_what_the_model_gives(more, size):
    check_parity(Attending(**more), torch.randn(2, 3, *size), share=2e-6)


def test_bands_of_one_row_give_the_same():
    check_parity(Attending(), torch.randn(1, 3, 24, 23), bands=(1, 7), parts=(1,), share=2e-6)


class AttendingChannelsFirst(nn.Module):
    """The same of maps as they are: a token's channels lie apart in memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image):
        x = self.first(image)
        tokens = x.flatten(2).transpose(1, 2)[:, None]
        found = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.last(x + found[:, 0].transpose(1, 2).view(x.shape))


def test_strided_queries_take_no_memory_for_scores():
    image = torch.randn(1, 3, 40, 50)
    check_parity(AttendingChannelsFirst(), torch.randn(2, 3, 24, 23), share=2e-6)
    step = step_of(program_of(AttendingChannelsFirst(), image))
    keys = torch.randn(1, 1, 16, 2000).transpose(2, 3)
    with torch.no_grad():
        held = live_peak_bytes(lambda: step.run((0, 8), [keys[:, :, :400]], [keys, keys]))
    assert held < 400 * 2000 * 4  # the scores of this band


def test_scores_are_predicted_where_pytorchs_kernel_keeps_them():
    module, image = Attending(value_dim=24), torch.randn(1, 3, 40, 50)
    check_parity(module, torch.randn(2, 3, 24, 23), share=2e-6)
    step = step_of(program_of(module, image))
    query, key, value = (torch.randn(1, 1, 2000, width) for width in (16, 16, 24))
    with torch.no_grad():
        held = live_peak_bytes(lambda: step.run((0, 8), [query[:, :, :400]], [key, value]))
    predicted = step.workspace_bytes(400, 400 * 16 * 4, 400 * 24 * 4)
    assert 400 * 2000 * 4 < held <= 1.1 * predicted
    assert predicted <= 2 * held
