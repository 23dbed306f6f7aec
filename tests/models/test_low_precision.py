"""Networks in bf16 and fp16 between pictures in fp32."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models import low_precision
from lowtide.models.low_precision import Fp32EdgeConv, LowPrecisionWrapper, to_low_precision
from lowtide.models.optimized.replace import replace_modules


def picture(height=45, width=38, channels=3):
    """Smooth, as photographs are."""
    noise = torch.rand(1, channels, 6, 5, generator=torch.Generator().manual_seed(3))
    return F.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)


def decibels(result, expected):
    return -10 * math.log10((result.double() - expected.double()).square().mean())


def edges(network):
    return [name for name, part in network.named_modules() if isinstance(part, Fp32EdgeConv)]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("compact", ["body.0", "body.6"]),
        ("esrgan", ["model.0", "model.10"]),
        ("swinir", ["conv_first", "upsample.0"]),
    ],
)
@torch.no_grad()
def test_both_ends_of_a_network_stay_in_fp32(network, name, ends):
    plain = network(name).eval()
    replace_modules(plain)  # spandrel's own windows do not run in bf16
    images = picture(48, 40)
    expected, low = plain(images), to_low_precision(plain, torch.bfloat16, images)
    assert edges(low.body) == ends and low.reason == ""
    types = {weight.dtype for weight in low.body.parameters()}
    assert types == {torch.float32, torch.bfloat16}
    result = low(images)
    assert result.dtype == torch.float32 and result.shape == expected.shape
    assert {weight.dtype for weight in plain.parameters()} == {torch.float32}
    throughout = copy.deepcopy(plain).bfloat16()(images.bfloat16())
    assert decibels(result, expected) > decibels(throughout, expected) + 1


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 70), (torch.float16, 90)])
@torch.no_grad()
def test_the_fixed_path_of_bundled_models_stays_in_fp32(dtype, least):
    model = lowtide.load("lowtide-x2")
    images = picture()
    expected, weight_bytes = model(images), model.descriptor.weight_bytes
    assert model.to_low_precision(dtype).dtype == torch.float32
    assert decibels(model(images), expected) > least
    # The fixed filter enlarges the picture itself; it is small, as the convolutions at both ends.
    assert model.module.body.base.kernel.dtype == torch.float32
    assert model.descriptor.weight_bytes < 0.75 * weight_bytes


class Shifted(nn.Module):
    """With colors changed before and behind, and a 1×1 convolution at the end of the body."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.head, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.tail = nn.Conv2d(16, 3, 1)

    def forward(self, images):
        images = self.before(images)
        return self.behind(self.tail(self.body(self.head(images)).relu()) + images)


@torch.no_grad()
def test_convolutions_between_images_belong_to_the_ends():
    network = Shifted().eval()
    low = to_low_precision(network, torch.bfloat16, picture())
    assert set(edges(low.body)) == {"before", "head", "tail", "behind"}
    # Also where a faster part stands for them.
    replace_modules(network)
    again = to_low_precision(network, torch.bfloat16, picture())
    assert set(edges(again.body)) == {"before", "head", "tail", "behind"}
    torch.testing.assert_close(again(picture()), low(picture()), atol=1e-5, rtol=0)


class Loose(nn.Module):
    """A network with weights of its own, which it gives the picture."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, images):
        return self.last(F.conv2d(images, self.weight))


@torch.no_grad()
def test_a_network_that_cannot_be_run_so_is_all_in_the_low_precision():
    low = to_low_precision(Loose().eval(), torch.bfloat16, picture())
    assert "type" in low.reason and low.input_dtype == torch.bfloat16 and not edges(low)
    assert low(picture()).dtype == torch.float32


FORMS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 5, "padding": 2, "stride": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3},
    {"kernel_size": (1, 4), "padding": (0, 2), "stride": (3, 1)},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]


@pytest.mark.grid(3)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@torch.no_grad()
def test_strips_give_what_the_whole_gives(monkeypatch, form, order):
    plain = nn.Conv2d(6, 4, **form).eval()
    edge = Fp32EdgeConv.of(plain, torch.bfloat16)
    images = torch.randn(2, 6, 31, 17).bfloat16().contiguous(memory_format=order)
    expected = plain(images.float()).bfloat16()
    for height in (1, 2, 5, 30):
        monkeypatch.setattr(low_precision, "_STRIP_BYTES", height * 2 * 6 * 17 * 4)
        result = edge(images)
        assert result.dtype == torch.bfloat16 and result.shape == expected.shape
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=1e-2)
        assert result.is_contiguous(memory_format=order)


@torch.no_grad()
def test_ends_hold_strips_of_what_they_convert():
    edge = Fp32EdgeConv.of(nn.Conv2d(64, 3, 3, padding=1), torch.float32)
    images = torch.randn(1, 64, 640, 512).bfloat16()
    converted = 4 * images.numel()
    # The workspace of a convolution differs by processor.
    assert live_peak_bytes(lambda: edge(images)) < 0.75 * converted
    assert live_peak_bytes(lambda: edge.float()(images.float())) > converted


@torch.no_grad()
def test_a_copy_of_it_is_the_same():
    low = to_low_precision(Shifted().eval(), torch.float16, picture())
    assert isinstance(low, LowPrecisionWrapper)
    assert torch.equal(copy.deepcopy(low)(picture()), low(picture()))


@torch.no_grad()
def test_nothing_watches_it_any_more():
    low = lowtide.load("lowtide-x2").to_low_precision(torch.float16).module
    hooks = {hook for part in low.modules() for hook in part._forward_pre_hooks.values()}
    assert hooks == {low_precision._cast}
    exported = torch.export.export(low, (picture(),), strict=False).module()
    torch.testing.assert_close(exported(picture()), low(picture()), atol=1e-5, rtol=0)
