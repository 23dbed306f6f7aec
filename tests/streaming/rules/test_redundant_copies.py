"""Copies between two orders: which are left out, and that nothing changes without them."""

from unittest import mock

import pytest
import torch
from torch import nn

from lowtide.streaming.rules.redundant_copies import redundant_copies
from support.band_runs import by_bands, check_parity, program_of


class Windows(nn.Module):
    """Tokens to channels, to windows of 4×4, to two heads, each copied; and back."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.to_tokens, self.back = nn.Linear(3, 8), nn.Conv2d(8, 3, 3, padding=1)
        self.between = between

    def forward(self, image):
        batch, _, height, width = image.shape
        tokens = self.to_tokens(image.flatten(2).transpose(1, 2))
        channels = tokens.transpose(1, 2).contiguous().view(batch, 8, height, width)
        if self.between is not None:
            channels = self.between(channels)
        split = channels.view(batch, 8, height // 4, 4, width // 4, 4)
        windows = split.permute(0, 2, 4, 3, 5, 1).contiguous().view(-1, 16, 2, 4)
        heads = windows.permute(0, 2, 1, 3).contiguous()
        heads = torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
        joined = heads.transpose(1, 2).reshape(-1, 16, 8)
        split = joined.view(batch, height // 4, width // 4, 4, 4, 8)
        pixels = split.permute(0, 1, 3, 2, 4, 5).reshape(batch, height * width, 8)
        return self.back(pixels.transpose(1, 2).contiguous().view(batch, 8, height, width))


def test_only_the_copy_before_another_is_left_out():
    graph = program_of(Windows(), torch.rand(1, 3, 16, 8)).graph
    idle = redundant_copies(graph)
    # Tokens as channels are looked at as windows, and copied. Windows and heads cannot be looked
    # at without a copy, and the last is what a convolution reads.
    assert [graph.nodes[index].meta.shape for index in idle] == [(1, 8, 128)]


@pytest.mark.parametrize("between", [nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)])
def test_operators_that_compute_keep_the_whole_runs_strides(between):
    graph = program_of(Windows(between), torch.rand(1, 3, 16, 8)).graph
    assert not redundant_copies(graph)


def test_a_result_is_not_left_non_contiguous():
    class Last(nn.Module):
        def forward(self, image):
            copied = image.transpose(1, 3).contiguous()
            return copied.transpose(1, 3).contiguous() + copied.transpose(1, 3)

    assert not redundant_copies(program_of(Last(), torch.rand(1, 3, 8, 8)).graph)


@pytest.mark.parametrize("size", [(16, 8), (28, 12), (4, 20)])
def test_they_give_the_same_values(size):
    check_parity(Windows().double(), torch.rand(1, 3, *size, dtype=torch.float64))


@pytest.mark.parametrize("bands", [1, 2, 4])
def test_later_results_are_the_same_bit_for_bit(bands):
    module, image = Windows(), torch.rand(1, 3, 16, 8)
    program = program_of(module, image)
    assert any(program.steps[index].view for index in redundant_copies(program.graph))
    with mock.patch("lowtide.streaming.engine.program.redundant_copies", return_value=set()):
        copied = program_of(module, image)
    assert torch.equal(by_bands(program, image, bands), by_bands(copied, image, bands))
