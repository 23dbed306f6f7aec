"""What a captured graph leaves out of what the model does."""

import pytest
import torch
from torch import nn

from lowtide.streaming.capture.export_graph import capture_graph
from lowtide.streaming.rules.rule import op_name
from support.band_runs import check_parity


class Scaled(nn.Module):
    """Two convolutions, each with something done to its result."""

    def __init__(self, scaled):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.scaled = scaled

    def forward(self, image):
        return self.scaled(self.second(self.scaled(self.first(image))))


def operators(module, image):
    return [
        op_name(node.target) for node in capture_graph(module.eval(), image).nodes if node.target
    ]


@pytest.mark.parametrize(
    "scaled",
    [lambda x: x / 1, lambda x: x / 1.0, lambda x: x * 1, lambda x: 1.0 * x, lambda x: x * True],
)
def test_scales_of_one_are_left_out(scaled):
    image = torch.rand(1, 3, 19, 8).double()
    module = Scaled(scaled).double()
    assert operators(module, image) == ["conv2d", "conv2d"]
    check_parity(module, image)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda x: x / 2,
        lambda x: torch.div(x, 1, rounding_mode="floor"),
        lambda x: ((x > 0) * 1.0).to(x.dtype),  # of another type than what it is made of
        lambda x: x * torch.ones(()),
    ],
)
def test_others_stay(scaled):
    image = torch.rand(1, 3, 19, 8).double()
    module = Scaled(scaled).double()
    assert {"mul", "div"} & set(operators(module, image))
    check_parity(module, image)


@pytest.mark.parametrize("copied", [torch.clone, nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_copies_that_lie_alike_are_left_out(copied):
    image = torch.rand(1, 3, 19, 8).double()
    module = Scaled(copied).double()
    assert operators(module, image) == ["conv2d", "conv2d"]
    check_parity(module, image)


def test_copies_in_another_order_stay():
    image = torch.rand(1, 3, 19, 8).double()
    module = Scaled(lambda x: x.mT.contiguous().mT).double()
    assert operators(module, image).count("clone") == 2
    check_parity(module, image)


def test_a_model_that_is_a_scale_of_one_gives_its_input_back():
    class One(nn.Module):
        def forward(self, image):
            return image / 1.0

    check_parity(One(), torch.rand(1, 3, 9, 4))
