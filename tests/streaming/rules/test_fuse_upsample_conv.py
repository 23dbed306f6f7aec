"""A nearest enlargement and the convolution after it, run as one operator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.streaming.rules.fuse_upsample_conv import fold_upsample_weight, upsample_conv2d
from lowtide.streaming.rules.rule import op_name
from support.band_runs import by_bands, check_parity, program_of


class Enlarged(nn.Module):
    """What decoders do: convolution, enlargement, convolution."""

    def __init__(self, *, factor=2, bias=True, kernel=3, padding=1, stride=1, both=False, **more):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 4, kernel, stride, padding, bias=bias, **more)
        self.last = nn.Conv2d(4, 2, 3, padding=1)
        self.factor, self.both = factor, both

    def forward(self, image):
        large = F.interpolate(self.first(image), scale_factor=self.factor, mode="nearest")
        found = self.second(large)
        return self.last(found + large[:, :4] if self.both else found)


def names(program):
    return [
        op_name(program.graph.nodes[index].target)
        for index in program.steps
        if index < len(program.graph.nodes)
    ]


def module_of(**more):
    torch.manual_seed(0)
    return Enlarged(**more).double().eval()


@pytest.mark.parametrize(
    ("height", "width", "more"),
    [
        (1, 1, {}),
        (1, 7, {"bias": False}),
        (2, 5, {}),
        (7, 3, {"padding": "same"}),
        (12, 9, {"bias": False}),
        (17, 16, {}),
    ],
    ids=str,
)
def test_equals_both_operators(height, width, more):
    torch.manual_seed(1)
    image = torch.randn(1, 3, height, width, dtype=torch.float64)
    module = module_of(**more)
    assert "upsample_conv2d" in names(program_of(module, image))
    assert "upsample_nearest2d" not in names(program_of(module, image))
    check_parity(module, image)


@pytest.mark.parametrize(
    "more",
    [
        {"factor": 3},
        {"padding": 0},
        {"stride": 2},
        {"kernel": 5, "padding": 2},
        {"dilation": 2, "padding": 2},
        {"both": True},
        {"kernel": 1, "padding": 0},
    ],
    ids=str,
)
def test_others_stay_two_operators(more):
    torch.manual_seed(1)
    image = torch.randn(1, 3, 8, 9, dtype=torch.float64)
    module = module_of(**more)
    assert "upsample_conv2d" not in names(program_of(module, image))
    check_parity(module, image)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_two_operators(dtype):
    image = torch.zeros(1, 3, 6, 7, dtype=dtype)
    assert "upsample_conv2d" not in names(program_of(module_of().to(dtype), image))


def test_one_after_another_with_the_same_weights():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 3, 3, padding=1)
    double = nn.Upsample(scale_factor=2, mode="nearest")
    module = nn.Sequential(double, layer, nn.SiLU(), double, layer).double().eval()
    image = torch.randn(1, 3, 7, 5, dtype=torch.float64)
    program = program_of(module, image)
    assert names(program).count("upsample_conv2d") == 2
    check_parity(module, image)


def test_the_result_of_the_model():
    module = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 2, 3, padding=1)).double()
    check_parity(module, torch.randn(1, 3, 9, 4, dtype=torch.float64))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_rounding_and_order_in_memory(form):
    torch.manual_seed(0)
    image = torch.randn(1, 64, 24, 21).contiguous(memory_format=form)
    weight, bias = torch.randn(48, 64, 3, 3) / 24, torch.randn(48)
    weight = weight.contiguous(memory_format=form)
    exact = F.conv2d(
        F.interpolate(image.double(), scale_factor=2), weight.double(), bias.double(), padding=1
    )
    plain = F.conv2d(F.interpolate(image, scale_factor=2), weight, bias, padding=1)
    found = upsample_conv2d(image, fold_upsample_weight(weight), bias)
    assert found.is_contiguous(memory_format=form)
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_bands_do_not_change_the_numbers():
    torch.manual_seed(0)
    image = torch.randn(1, 3, 33, 20)
    program = program_of(Enlarged().eval(), image)
    whole = by_bands(program, image, 1)
    for bands in (2, 5, 16):
        assert (by_bands(program, image, bands) - whole).abs().max() <= 2e-6
