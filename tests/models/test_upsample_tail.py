"""The last layers of window transformers, strip by strip."""

import copy
import importlib

import pytest
import torch

from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models.low_precision import Fp32EdgeConv, to_low_precision
from lowtide.models.optimized import narrow_conv
from lowtide.models.optimized.narrow_conv import DeferredLayers, OptimizedTail


class Tailed(torch.nn.Module):
    """What is left of a model where its attention is left out."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        home = importlib.import_module("spandrel.architectures.SwinIR.__arch.SwinIR")
        self.upsample = home.Upsample(scale, 6)
        self.conv_last = torch.nn.Conv2d(6, 3, 3, padding=1)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.conv_last(self.upsample(x))


@pytest.fixture(params=[2, 3, 4, 8])
def tails(request):
    plain = Tailed(request.param)
    fast = copy.deepcopy(plain)
    assert OptimizedTail.fits(fast.upsample, fast.conv_last)
    fast.conv_last = OptimizedTail(fast.conv_last, fast.upsample)
    fast.upsample = DeferredLayers(fast.upsample)
    return plain, fast


@pytest.mark.grid(3)
@pytest.mark.parametrize("size", [(1, 6, 41, 9), (2, 6, 17, 5), (1, 6, 8, 8), (1, 6, 3, 30)])
def test_strips_of_the_last_layers_are_the_whole(tails, size, monkeypatch):
    monkeypatch.setattr(narrow_conv, "_STRIP_BYTES", 1)
    plain, fast = tails
    x = torch.randn(size)
    heights = []
    fast.conv_last.before[0].register_forward_pre_hook(
        lambda _, given: heights.append(given[0].shape[2])
    )
    with torch.inference_mode():
        expected = plain(x)
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=1e-6)
    # Twelve rows at most, of which four see beyond their strip.
    assert (max(heights) <= 12) and (len(heights) > 1) == (size[2] > 8)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    given = x.requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None


def test_strips_take_no_more_than_they_may(tails, monkeypatch):
    monkeypatch.setattr(narrow_conv, "_STRIP_BYTES", 1 << 20)
    plain, fast = tails
    x = torch.randn(1, 6, 400, 64)
    with torch.inference_mode():
        result = plain(x)
        assert live_peak_bytes(lambda: fast(x)) < result.nbytes + (6 << 20)
        assert live_peak_bytes(lambda: plain(x)) > 3 * result.nbytes


def test_the_last_convolution_stays_in_fp32_in_half_precision(tails):
    _, fast = tails
    x = torch.rand(1, 6, 20, 14)
    low = to_low_precision(fast, torch.bfloat16, x)
    assert isinstance(low.body.conv_last.plain, Fp32EdgeConv)
    assert not low.reason
    with torch.inference_mode():
        expected, found = fast(x), low(x)
    assert found.dtype == torch.float32
    error = (found - expected).abs().max()
    assert 0 < error < 0.02 * expected.abs().max()


def test_other_last_layers_stay_as_they_are():
    conv, shuffle = torch.nn.Conv2d, torch.nn.PixelShuffle(2)
    before, last = torch.nn.Sequential(conv(6, 24, 3, padding=1), shuffle), conv(6, 3, 3, padding=1)
    assert OptimizedTail.fits(before, last)
    for odd in (
        conv(6, 24, 3),
        conv(6, 24, 3, padding=2, dilation=2),
        conv(6, 24, 3, padding="same"),
        conv(6, 24, 3, padding=1, stride=2),
        conv(6, 24, 3, padding=1, padding_mode="reflect"),
        torch.nn.GroupNorm(1, 6),
    ):
        assert not OptimizedTail.fits(torch.nn.Sequential(odd, shuffle), last)
    assert not OptimizedTail.fits(before[:1], last)
    assert not OptimizedTail.fits(before, torch.nn.Identity())
